"""The shim between the agent and a worker's program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from mindx_elastic.agent import child
from tests.harness import wait_until
from tests.watchdog import finish

SHIM = [sys.executable, "-I", "-S", str(child.__file__)]


def run(*command: str, parent: int | None = None) -> subprocess.CompletedProcess[str]:
    arguments = [*SHIM, str(os.getpid() if parent is None else parent), *command]
    return finish(arguments)


def test_the_process_becomes_the_program() -> None:
    code = (
        "import ctypes, os, signal, sys\n"
        "number = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)\n"  # PR_GET_PDEATHSIG
        "print(os.getppid(), number.value, sys.argv[1:], sys.flags.isolated)\n"
    )
    done = run(sys.executable, "-c", code, "a b", "-I")
    assert done.stdout.split(" ", 2) == [str(os.getpid()), "15", "['a b', '-I'] 0\n"]
    ignored = run("grep", "-E", "^SigIgn", "/proc/self/status").stdout.split()[1]
    assert int(ignored, 16) & (1 << (signal.SIGPIPE - 1)) == 0, "what Python ignores is not handed on"


def test_exit_codes_are_the_program_s() -> None:
    assert run("sh", "-c", "exit 7").returncode == 7
    missing = run("no-such-program")
    assert missing.returncode == 127 and "cannot run no-such-program" in missing.stderr
    assert run("/").returncode == 126
    done = run("echo", "started", parent=1)
    assert (done.returncode, done.stdout) == (143, ""), "its agent is gone"


def test_it_ends_with_its_agent() -> None:
    code = (
        "import os, subprocess, time\n"
        f"worker = subprocess.Popen([*{SHIM!r}, str(os.getpid()), 'sleep', '60'], start_new_session=True)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    worker = int(agent.stdout.readline())
    wait_until(lambda: Path(f"/proc/{worker}/comm").read_text() == "sleep\n", "exec of the program")
    agent.kill()
    agent.wait()
    agent.stdout.close()
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), "end of the worker")
