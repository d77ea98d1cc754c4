"""A script that `prove` runs finds what it finds under the interpreter itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindx_elastic.prove.control import Alarm, Control, read_control
from mindx_elastic.prove.processes import FreshProcess, Process, Request, Zygote
from mindx_elastic.prove.script import NOTES_FILE

ROOT = Path(__file__).parents[2]
PROBE = """
from __future__ import annotations
import atexit, dataclasses, json, os, pickle, random, sys, threading, time

@dataclasses.dataclass
class Thing:
    number: int

def late():
    time.sleep(0.1)
    print("thread", Thing(2), flush=True)

atexit.register(lambda: print("atexit", Thing(3), __name__, flush=True))
threading.Thread(target=late).start()
print(json.dumps({
    "name": __name__, "file": os.path.abspath(__file__), "argv": sys.argv, "path": sys.path[0], "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(), "spec": getattr(__spec__, "name", None),
    "pickle": pickle.loads(pickle.dumps(Thing(1))).number, "annotations": str(Thing.__annotations__),
    "variable": os.environ.get("PROBE"), "cwd": os.getcwd(), "leader": os.getsid(0) == os.getpid(),
}), flush=True)
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


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    made = Zygote({**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path_factory.mktemp("zygote") / "log")
    assert made.problem() == ""
    yield made
    made.close()


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PROBE": "1", **more}


def wait_for(process: Process) -> int:
    while (code := process.poll()) is None:
        os.sched_yield()
    process.end()
    return code


@pytest.mark.parametrize("how", ["forked", "fresh"])
@pytest.mark.parametrize("command", [["probe.py"], ["package/../probe.py"], ["-m", "package"], ["-m", "package.part"]])
def test_it_is_as_under_the_interpreter(
    program: Path, tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch, how: str, command: list[str]
) -> None:
    monkeypatch.chdir(program)
    folder = tmp_path / "run"
    folder.mkdir()
    control = Control(folder=folder, directories=tmp_path, streams=tmp_path).write(tmp_path / "control.json")
    env = environment(MINDX_PROVE=str(control))
    words = [*command, "7", "--flag", "--", "x"]
    plain = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, check=False, start_new_session=True
    )
    request = Request(command=words, env=env, log=tmp_path / "log", notes=folder / NOTES_FILE)
    process = zygote.start(request) if how == "forked" else FreshProcess(request)
    assert wait_for(process) == plain.returncode == 7
    assert request.log.read_text() == plain.stdout, plain.stderr
    assert '"pickle": 1' in plain.stdout and "atexit Thing(number=3) __main__" in plain.stdout


def test_each_fork_begins_with_other_numbers(tmp_path: Path, zygote: Zygote) -> None:
    script = tmp_path / "drawing.py"
    script.write_text("import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())")
    said = []
    for number in range(2):
        request = Request(command=[str(script)], env=environment(), log=tmp_path / f"log{number}", notes=None)
        assert wait_for(zygote.start(request)) == 0
        said.append(request.log.read_text().split())
    assert all(one != other for one, other in zip(*said, strict=True)), said


def test_what_it_does_is_noted(tmp_path: Path, zygote: Zygote) -> None:
    script, home = tmp_path / "writes.py", tmp_path / "home"
    home.mkdir()
    (home / "temporary").mkdir()
    script.write_text(
        "import os, tempfile\n"
        "open('kept.txt', 'w').write('x'); open('kept.txt', 'a'); open('/dev/null', 'w')\n"
        "tempfile.NamedTemporaryFile().write(b'x')\n"
        "open(__file__).read()\n"
        "os.environ['OMP_NUM_THREADS'] = '3'; os.environ['OTHER'] = '1'\n"
        "raise ValueError('no')\n"
    )
    script.rename(home / "writes.py")
    notes = tmp_path / "proof" / "run" / NOTES_FILE
    notes.parent.mkdir(parents=True)
    env = environment(TMPDIR=str(home / "temporary"), OMP_NUM_THREADS="1")
    request = Request(command=["writes.py"], env=env, log=tmp_path / "log", notes=notes)
    before = Path.cwd()
    os.chdir(home)
    try:
        assert wait_for(zygote.start(request)) == 1
    finally:
        os.chdir(before)
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [(note["kind"], note["text"]) for note in found] == [
        ("write", str(home / "kept.txt")),
        ("variable", "OMP_NUM_THREADS"),
        ("error", "no"),
    ]
    assert "ValueError: no" in request.log.read_text()


def test_a_process_is_ended_with_what_it_has_left_behind(tmp_path: Path, zygote: Zygote) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid) + '.')\n"
        "time.sleep(600)\n"
    )
    request = Request(command=[str(script)], env=environment(), log=tmp_path / "log", notes=None)
    process = zygote.start(request)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("."):
        assert process.poll() is None, request.log.read_text()
    process.end()
    assert process.poll() == -9
    child = int((tmp_path / "pid").read_text()[:-1])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_the_control_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    alarm = Alarm(series=1, step=3, rank=1, kill=True)
    one = Control(folder=tmp_path, directories=tmp_path, streams=tmp_path, steps=-1, last=(0, 4), alarm=alarm)
    assert read_control(one.write(tmp_path / "control.json")) == one
    assert str(alarm) == "killed after step 3"


def test_the_length_of_a_run(tmp_path: Path) -> None:
    def last(num_batches: int, took_s: float | None = None, **more: object) -> int:
        control = Control(folder=tmp_path, directories=tmp_path, streams=tmp_path, **more)  # type: ignore[arg-type]
        return next(n for n in range(1, 1000) if control.is_last(0, n, n, num_batches, took_s if n >= 30 else None))

    assert last(0, steps=7) == 7
    assert last(0, last=(0, 9)) == 9
    assert last(0, steps=-1) == 30, "where the length of an epoch is not known"
    assert last(50, steps=-1) == 55, "into the second epoch"
    assert last(500, steps=-1) == 30, "which is too far"
    assert last(6, steps=-1) == 30
    assert last(6, 0.5, steps=-1) == 100, "quick ones"
    assert last(500, 60.0, steps=-1) == 30
    assert last(6, 0.5, steps=40) == 40


def test_a_module_of_the_scripts_own_that_another_has_the_name_of(tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text("")
    made = Zygote(environment(), tmp_path / "log")
    try:
        assert "has modules of its own with the names of others: numbers" in made.problem(tmp_path)
    finally:
        made.close()
