"""``mindx-elastic prove`` as a command: its options, its exit codes, and jobs of several ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mindx_elastic.cli.prove import split_line
from tests.cli.conftest import Run
from tests.harness import JOBS, Job, children, wait_until
from tests.prove.test_runs import is_gone
from tests.watchdog import Watchdog, finish

ROOT = Path(__file__).parents[2]
MAIN = "mindx_elastic.cli.main"


def environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MINDX_", "MS_", "TORCHELASTIC", "COLUMNS"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return env | more


def run(*words: object, cwd: Path, command: str = "prove", **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", MAIN, command, *map(str, words)]
    return finish(line, cwd=cwd, env=environment(**env))


@pytest.fixture
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory file system of the test's own: other proofs are none of its business."""
    return tmp_path_factory.mktemp("memory")


def test_the_line_is_divided_at_the_script() -> None:
    assert split_line(["--stops", "2", "--", "t.py", "--", "x"]) == (["--stops", "2"], ["t.py", "--", "x"])
    assert split_line(["--nproc-per-node", "2", "--", "-m", "pkg"]) == (["--nproc-per-node", "2"], ["-m", "pkg"])
    assert split_line(["--steps", "3", "t.py", "--steps", "4"]) == (["--steps", "3"], ["t.py", "--steps", "4"])
    assert split_line(["--help"]) == (["--help"], [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the script"),
        (["--", "none.py"], "none.py: no such file"),
        (["--stops", "0", "--", "s.py"], "--stops 0: give a number from 1, or all"),
        (["word", "--", "s.py"], "word is not an option"),
        (["--nproc-per-node", "2", "--", "none.py"], "none.py: no such file"),
        (["--stop", "3", "--", "s.py"], "--stop: no such option; neither of prove nor of mindx-elastic run"),
        (["--nproc-per-node", "2", "3", "--", "s.py"], "3 is not an option"),
        (["--nnodes", "2", "--", "s.py"], "--nnodes 2: this runs on one node; leave it out"),
    ],
)
def test_wrong_usage(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    assert_refused(run, tmp_path, monkeypatch, ["prove", *words], said)


def assert_refused(run: Run, folder: Path, patch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    """Before the script ``s.py`` is started."""
    (folder / "s.py").write_text("raise SystemExit('the script is not started')")
    patch.chdir(folder)
    shown = run(*words)
    assert shown.exit_code == 2 and shown.stdout == "" and said in " ".join(shown.stderr.split()), shown
    assert "usage:" not in shown.stderr and "not started" not in shown.stderr
    assert [path.name for path in folder.iterdir()] == ["s.py"]


def test_one_rank_with_all_reports(tmp_path: Path) -> None:
    words = ["--stops", 1, "--steps", 4, "--json", "--keep", "kept", "--seed", 3]
    result = run(*words, "--", JOBS / "proved.py", "scaled_on_0", "ckpt", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    document = json.loads(result.stdout)
    assert (document["outcome"], document["steps"], document["exit_code"]) == ("differs", 4, 1)
    last = document["runs"][-1]
    found = last["explained"]
    assert "the batch of step " in found["what"] and "is another one" in found["what"]
    assert last["rank"] == 0 and "counter" in found["cause"]
    assert "own_steps (" in found["variables"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert list((tmp_path / "kept").glob("run_*/output.log"))
    assert run("--keep", "kept", "--", JOBS / "proved.py", "exact", "ckpt", cwd=tmp_path).returncode == 2


@pytest.mark.drill
def test_the_rank_that_differs_is_named(tmp_path: Path) -> None:
    words = ["--stops", 1, "--steps", 4, "--nproc-per-node", 2]
    result = run(*words, "--", JOBS / "proved.py", "scaled_on_1", tmp_path / "ckpt", cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "is another one; not got back: own_steps" in result.stdout and "(rank 1)" in result.stdout


def interrupted(tmp_path: Path, memory: Path, signum: int, code: int, ready: Callable[[Job], bool]) -> None:
    """Interrupt a proof when it is `ready`, and see that it leaves nothing."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", MAIN, "prove", "--", str(JOBS / "proved.py"), "slow", "ckpt"]
    places = {"TMPDIR": str(temporary), "MINDX_ARENA_DIR": str(memory), "MINDX_TEST_READY": str(tmp_path / "ready")}
    job = Job(command, environment(**places))
    try:
        watchdog = Watchdog(job.process.pid)
        while not ready(job):
            assert job.process.poll() is None, job.report()
            watchdog.check(len(job.lines))
            time.sleep(0.01)
        below = children(job.process.pid)
        job.process.send_signal(signum)
        job.expect(code)
    finally:
        job.end()
    assert below
    wait_until(lambda: all(is_gone(pid) for pid in below), "the end of what the proof had started")
    assert not list(temporary.glob("mindx-prove-*"))
    assert not list(memory.iterdir())


@pytest.mark.drill
def test_an_interrupted_proof_leaves_nothing(tmp_path: Path, memory: Path) -> None:
    ready = tmp_path / "ready"
    interrupted(tmp_path, memory, signal.SIGTERM, 143, lambda job: ready.exists())
    assert is_gone(int(ready.read_text()))


def test_a_proof_that_is_interrupted_while_it_imports_torch(tmp_path: Path, memory: Path) -> None:
    def begun(job: Job) -> bool:
        """The processes that fork are there, and have not come to their import, or are in the middle of it."""
        return any("zygote_process" in command_of(pid) for pid in children(job.process.pid))

    interrupted(tmp_path, memory, signal.SIGINT, 130, begun)
    assert not (tmp_path / "ready").exists()


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
