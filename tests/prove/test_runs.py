"""One run of the script: its folders and environment, what is read of it, and the end of a stuck one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.core.posix import read_stat, start_ticks
from mindx_elastic.errors import UsageError
from mindx_elastic.memory.folders import MAKER_FILE, make_user_folder
from mindx_elastic.prove.control import read_control
from mindx_elastic.prove.runs import Command, Runs
from tests.harness import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A memory file system of the test's own."""
    folder = tmp_path / "memory"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("MINDX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MINDX_ARENA_DIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def write(tmp_path: Path, text: str) -> Command:
    (tmp_path / "script.py").write_text(text)
    return Command(script=(str(tmp_path / "script.py"),))


def test_a_run_has_places_of_its_own_and_none_of_a_job_around_it(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDX_AGENT_DIR", "/of/another/job")
    command = write(tmp_path, "import os\nfor name in sorted(os.environ): print(name, '=', os.environ[name])\n")
    with Runs(command, fresh=True) as runs:
        chain = runs.chain()
        outcome = runs.run(chain, steps=4)
        said = dict(line.split(" = ", 1) for line in outcome.log.read_text().splitlines() if " = " in line)
        control = read_control(Path(said["MINDX_PROVE"]))
        assert (control.steps, control.directories) == (4, chain.directories)
        assert Path(said["MINDX_ARENA_DIR"]).parent.parent == memory and "MINDX_AGENT_DIR" not in said
        folder = runs.folder
        runs.drop(chain)
        assert not chain.directories.exists()
    assert not folder.exists() and not list(memory.iterdir())


def is_gone(pid: int) -> bool:
    """A zombie counts as gone: its parent may not have looked yet."""
    state = read_stat(pid)
    return state is None or state.is_ending


def test_a_run_that_does_nothing_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    start = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    command = write(tmp_path, f"import subprocess, sys, time\nprint({start}.pid)\ntime.sleep(3600)\n")
    with Runs(command, fresh=True, timeout_s=1.0) as runs:
        outcome = runs.run(runs.chain())
        child = int(outcome.lines[0])
    assert outcome.hung_s == 1.0
    wait_until(lambda: is_gone(child), "the end of what the run has started")


@pytest.mark.slow
def test_a_stuck_agent_gets_the_time_to_end_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_worker(runs: Runs, process: object, folder: Path, log: Path) -> float:
        wait_until(lambda: "here" in log.read_text(), "the worker")
        return 1.0

    monkeypatch.setattr(Runs, "_wait", wait_for_worker)
    script = write(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(3600)\n").script
    with Runs(Command(script=script, agent=("--grace", "1"))) as runs:
        lines = runs.run(runs.chain()).log.read_text().splitlines()
    assert lines[-1].endswith("SIGTERM; exit code 143"), lines


def test_what_a_killed_proof_has_left_is_removed(tmp_path: Path, memory: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = make_user_folder(memory) / f"prove-{ended.pid}-00ff"
    left.mkdir(mode=0o700)
    (left / MAKER_FILE).write_text(own_identity().replace(start_ticks(os.getpid()), "1"))
    with Runs(write(tmp_path, ""), fresh=True):
        assert not left.exists() and len(list(memory.iterdir())) == 1
    assert not list(memory.iterdir())


def test_what_is_kept_stays_and_goes_into_an_empty_folder(tmp_path: Path) -> None:
    command = write(tmp_path, "print('a line')\n")
    with Runs(command, fresh=True, keep=tmp_path / "kept") as runs:
        runs.drop(chain := runs.chain())
        runs.run(chain)
    assert (tmp_path / "kept" / "run_001" / "output.log").read_text() == "a line\n"
    assert (tmp_path / "kept" / "checkpoints_1").is_dir()
    with pytest.raises(UsageError, match="the folder is not empty"), Runs(command, keep=tmp_path / "kept"):
        pass


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize("options", [("--recover", "in-place"), ()], ids=["in place", "restart"])
def test_the_workers_of_an_agent_are_forked_from_one_that_has_imported_torch(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A variable that imports read, and that the agent sets otherwise than the proof, made each a fresh interpreter."""
    script = write(tmp_path, "import sys\nprint('torch' in sys.modules, flush=True)\n").script
    with Runs(Command(script=script, agent=("--nproc-per-node", "2", *options)), timeout_s=600) as runs:
        outcome = runs.run(runs.chain())
        lines = outcome.log.read_text().splitlines()
    assert outcome.code == 0 and lines.count("True") == 2, lines
