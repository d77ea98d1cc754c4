"""A script that `prove` runs finds what it finds under the interpreter itself."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from mindx_elastic.agent.zygote import Zygote
from mindx_elastic.prove.processes import Request, start_forked, start_fresh
from mindx_elastic.prove.script import NOTES_FILE
from tests.prove.started import forking, of_a_run, wait_for

PROBE = """
from __future__ import annotations
import atexit, dataclasses, json, os, pickle, random, sys, threading

@dataclasses.dataclass
class Thing:
    number: int

printed = threading.Event()

def late():
    printed.wait()
    print("thread", Thing(2), flush=True)

atexit.register(lambda: print("atexit", Thing(3), __name__, flush=True))
threading.Thread(target=late).start()
print(json.dumps({
    "name": __name__, "file": os.path.abspath(__file__), "argv": sys.argv, "path": sys.path[0], "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(), "spec": getattr(__spec__, "name", None),
    "pickle": pickle.loads(pickle.dumps(Thing(1))).number, "annotations": str(Thing.__annotations__),
    "variable": os.environ.get("PROBE"), "cwd": os.getcwd(), "leader": os.getsid(0) == os.getpid(),
}), flush=True)
printed.set()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "program"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("")
    for path in ("probe.py", "package/__main__.py", "package/part.py"):
        (folder / path).write_text(PROBE)
    return folder


@pytest.mark.drill
@pytest.mark.parametrize("how", ["forked", "fresh"])
@pytest.mark.parametrize("command", [["probe.py"], ["package/../probe.py"], ["-m", "package"], ["-m", "package.part"]])
def test_it_is_as_under_the_interpreter(
    program: Path, tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch, how: str, command: list[str]
) -> None:
    monkeypatch.chdir(program)
    folder = tmp_path / "run"
    folder.mkdir()
    env = of_a_run(folder)
    words = [*command, "7", "--flag", "--", "x"]
    plain = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, check=False, start_new_session=True
    )
    request = Request(command=words, env=env, log=tmp_path / "log")
    process = start_forked(zygote, request) if how == "forked" else start_fresh(request)
    assert wait_for(process) == plain.returncode == 7
    assert request.log.read_text() == plain.stdout, plain.stderr
    assert '"pickle": 1' in plain.stdout and "atexit Thing(number=3) __main__" in plain.stdout


@pytest.mark.parametrize("how", ["forked", "fresh"])
def test_what_it_does_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    home, folder = tmp_path / "home", tmp_path / "proof" / "run"
    (home / "temporary").mkdir(parents=True)
    folder.mkdir(parents=True)
    (home / "writes.py").write_text(
        "import os, tempfile\n"
        "open('kept.txt', 'w').write('x'); open('kept.txt', 'a'); open('/dev/null', 'w')\n"
        "tempfile.NamedTemporaryFile().write(b'x')\n"
        "open(__file__).read()\n"
        "import torch\n"
        "torch.save({}, 'best.pt'); torch.save({}, os.environ['TMPDIR'] + '/other.pt')\n"
        "assert torch.load('best.pt') == {}\n"
        "raise ValueError('no')\n"
    )
    env = of_a_run(folder, TMPDIR=str(home / "temporary"))
    request = Request(command=["writes.py"], env=env, log=tmp_path / "log")
    monkeypatch.chdir(home)
    with forking(env) if how == "forked" else nullcontext() as zygote:
        assert wait_for(start_fresh(request) if zygote is None else start_forked(zygote, request)) == 1
    found = [json.loads(line) for line in (folder / NOTES_FILE).read_text().splitlines()]
    assert [(note["kind"], note["text"]) for note in found] == [
        ("write", str(home / "kept.txt")),
        ("write", str(home / "best.pt")),
        ("error", "no"),
    ]
    assert "ValueError: no" in request.log.read_text()
