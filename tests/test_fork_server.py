"""A forked process is what a fresh interpreter would be, to its script and to whoever watches and signals it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fork_server import ForkedProcess

FACTS = """
import atexit, json, os, random, sys, threading
atexit.register(print, "LEFT", flush=True)
class Ours: pass
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "cwd": os.getcwd(), "env": os.environ.get("OF_THE_JOB"),
    "home": "HOME" in os.environ, "main": sys.modules["__main__"].Ours is Ours, "name": Ours.__module__,
    "ours": [name for name in sys.modules if name.startswith("mindx_elastic")], "random": random.random(),
    "threads": threading.active_count(), "leader": os.getsid(0) == os.getpid(),
    "open": len(os.listdir("/proc/self/fd")), "parent": os.getppid(),
}), flush=True)
sys.stdout.reconfigure(errors="backslashreplace")
print("TO STDERR", file=sys.stderr)
sys.exit(7)
"""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")


def start(folder: Path, source: str, *arguments: str, under: Sequence[str] = ()) -> ForkedProcess:
    script = folder / "script.py"
    script.write_text(source, encoding="utf-8")
    env = {**os.environ, "OF_THE_JOB": "yes"}
    env.pop("HOME", None)
    command = [sys.executable, *under, str(script), *arguments]
    return ForkedProcess(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("under", [(), TORCHRUN])
def test_its_script_finds_what_it_would_find_in_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under: Sequence[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = set()
    for _ in range(2):
        process = start(tmp_path, FACTS, "--word", "two words", under=under)
        with process.stdout as output:
            lines = output.read().splitlines()
        assert process.wait() == (1 if under else 7)
        assert lines[1:3] == ["TO STDERR", "LEFT"], "by way of atexit"
        facts = json.loads(lines[0])
        assert facts.pop("parent") == (process.pid if under else os.getpid()), "a child of who starts it"
        numbers.add(facts.pop("random"))
        assert facts.pop("open") <= 5, "no connection of the server or of another job"
        script = str(tmp_path / "script.py")
        assert facts.pop("argv") == [script, "--word", "two words"]
        assert facts == {
            "path": str(tmp_path),
            "file": script,
            "cwd": str(tmp_path),
            "env": "yes",
            "home": False,
            "main": True,
            "name": "__main__",
            "ours": [],
            "threads": 1,
            "leader": True,
        }
    assert len(numbers) == 2, "the same random numbers in two jobs"


def test_signals_and_waiting_are_those_of_a_child(tmp_path: Path) -> None:
    process = start(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(600)")
    with process.stdout as output:
        assert output.readline() == "up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
        assert process.wait() == process.poll() == -signal.SIGTERM
        process.kill()  # as Popen: nothing is there to kill
        assert output.read() == ""
    assert not Path(f"/proc/{process.pid}").exists(), "reaped"
