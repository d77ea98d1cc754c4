"""``mindx-elastic prove`` as a command: its options, its exit codes, and jobs of several ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mindx_elastic.cli.prove import _split
from tests.harness import JOBS, Job

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MINDX_", "MS_", "TORCHELASTIC"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return env | more


def run(*words: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mindx_elastic", "prove", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment(**env), capture_output=True, text=True, check=False)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A memory file system for this test alone: other tests prove at the same time."""
    with tempfile.TemporaryDirectory(prefix="mindx-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_the_line_is_divided_at_the_script() -> None:
    assert _split(["--stops", "2", "--", "t.py", "--", "x"]) == (["--stops", "2"], ["t.py", "--", "x"])
    assert _split(["--nproc-per-node", "2", "--", "-m", "pkg"]) == (["--nproc-per-node", "2"], ["-m", "pkg"])
    assert _split(["--steps", "3", "t.py", "--steps", "4"]) == (["--steps", "3"], ["t.py", "--steps", "4"])
    assert _split(["--help"]) == (["--help"], [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the script"),
        (["--", "none.py"], "none.py: no such file"),
        (["--stops", "0", "--", "none.py"], "--stops 0: give a number from 1, or all"),
        (["--", "-m"], "-m needs the name of a module"),
        (["word", "--", "none.py"], "word is no option"),
    ],
)
def test_wrong_usage(tmp_path: Path, words: list[str], said: str) -> None:
    result = run(*words, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr, result.stderr


def test_one_rank_with_all_reports(tmp_path: Path) -> None:
    words = ["--stops", 1, "--steps", 4, "--junit", "prove.xml", "--json", "--keep", "kept", "--seed", 3]
    result = run(*words, "--", JOBS / "proved.py", "scaled_on_0", "ckpt", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    document = json.loads(result.stdout)
    assert (document["outcome"], document["steps"], document["exit_code"]) == ("differs", 4, 1)
    found = document["runs"][-1]["first_difference"]
    assert "the loader handed out the same, and the model was given something else" in found["what"]
    assert found["rank"] == 0 and "counter" in found["cause"]
    assert '"own_steps" (main() in proved.py)' in found["variables"]
    suite = ElementTree.fromstring((tmp_path / "prove.xml").read_text())
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("3", "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "prove.xml"]
    assert list((tmp_path / "kept").glob("run_*/output.log"))
    assert run("--keep", "kept", "--", JOBS / "proved.py", "exact", "ckpt", cwd=tmp_path).returncode == 2


def test_two_ranks_are_stopped_and_killed_under_the_agent(tmp_path: Path, memory: Path) -> None:
    words = ["--stops", 1, "--steps", 5, "--kill", "--nproc-per-node", 2]
    result = run(
        *words, "--", JOBS / "proved.py", "exact", tmp_path / "ckpt", cwd=tmp_path, MINDX_ARENA_DIR=str(memory)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all equal: 5 steps of 2 ranks" in result.stdout
    assert "killed after step" in result.stdout and "stopped after step" in result.stdout
    assert not list(tmp_path.iterdir()), "not even the agent's run directory"
    assert not list(memory.iterdir())


def test_the_rank_that_differs_is_named(tmp_path: Path) -> None:
    words = ["--stops", 1, "--steps", 4, "--nproc-per-node", 2]
    result = run(*words, "--", JOBS / "proved.py", "scaled_on_1", tmp_path / "ckpt", cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "the model was given something else (rank 1)" in result.stdout


def test_an_interrupted_proof_leaves_nothing(tmp_path: Path, memory: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "mindx_elastic", "prove", "--", str(JOBS / "proved.py"), "slow", "ckpt"]
    ready = str(tmp_path / "ready")
    job = Job(command, environment(TMPDIR=str(temporary), MINDX_TEST_READY=ready, MINDX_ARENA_DIR=str(memory)))
    try:
        while not (tmp_path / "ready").exists():
            assert job.process.poll() is None, job.report()
        job.process.send_signal(signal.SIGTERM)
        job.expect(143)
    finally:
        job.end()
    assert not list(temporary.glob("mindx-prove-*"))
    assert not list(memory.iterdir())
    pid = int((tmp_path / "ready").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"
