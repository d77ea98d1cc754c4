"""Ranks that divide a stop's save: what each of them writes, and what is left when some of them die, hang or cannot
write in it. Real processes and signals; every fault says that it has fired."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from safetensors import safe_open

from mindx_elastic.persist.format import Header, read_header
from mindx_elastic.start.findings import list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory, SavedStep
from tests.harness import Job, events, run_job, start_job
from tests.system.conftest import Reference

pytestmark = pytest.mark.slow
RANKS = 3
ALWAYS = {"MINDX_DIVIDED_SAVES": "always", "MINDX_ARENA_DIR": "none"}
AT = 8  # the step at which a job held at 7 stops


def stop(
    directory: Path, *args: object, ranks: int = RANKS, fault: str = "", said: str = "", memory: str = "none"
) -> Job:
    """A job that got a SIGTERM in mid-epoch. `fault`: an injection; `said`: the line that tells of it. `memory`: the
    folder for what outlives a process."""
    args = ("--hold-at", AT - 1, *args, *(("--inject", fault) if fault else ()))
    env = {**ALWAYS, "MINDX_ARENA_DIR": memory}
    with start_job("loop.py", directory, *args, ranks=ranks, env=env) as job:
        job.wait_for("HOLD", count=ranks)
        pids = job.pids()
        for rank in range(ranks):
            job.signal_rank(rank)
        if said:
            job.wait_for(said)
        if said.startswith("STOPPED"):
            survivors = [r for r in range(ranks) if r != int(said.split()[1])]
            job.wait_for(r"INFO step \d+ saved", count=len(survivors))
            os.kill(pids[int(said.split()[1])], signal.SIGKILL)
        job.wait()
    return job


def headers(directory: Path) -> dict[str, Header]:
    return {
        str(path.relative_to(directory)): read_header(path) for path in sorted(directory.glob("rank_*/*.safetensors"))
    }


def newest(directory: Path) -> SavedStep:
    inventory = Inventory.merge([scan(list_files([directory]), trust=reader_trust(directory))])
    return inventory.steps[0]


def assert_resumes_equal(directory: Path, whole: Job, first: Job, memory: str) -> Job:
    """The same weights as the uninterrupted run's, on every rank."""
    resumed = run_job("loop.py", directory, ranks=RANKS, env={**ALWAYS, "MINDX_ARENA_DIR": memory})
    assert resumed.matches(rf"READY \d+ \d+ {AT}"), resumed.report()
    assert resumed.hashes() == whole.hashes(), f"{first.report()}\n\n{resumed.report()}"
    return resumed


Stopped = Callable[[], tuple[Job, Path]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A job of three ranks that has divided its save, once for several tests; each takes a copy of the folder."""

    @cache
    def get() -> tuple[Job, Path]:
        directory = tmp_path_factory.mktemp("together")
        return stop(directory), directory

    return get


def test_each_rank_writes_two_parts_of_three(stopped: Stopped) -> None:
    job, directory = stopped()
    found = headers(directory)
    assert len(found) == RANKS, job.report()
    for name, header in found.items():
        assert header.held is not None and header.held.division.count == RANKS, name
        with safe_open(directory / name, "pt") as file:  # stock safetensors
            assert set(file.keys()) == header.entries.keys()
    parts = [part for header in found.values() if header.held is not None for part in header.held.parts]
    assert sorted(parts) == [0, 0, 1, 1, 2, 2]
    assert newest(directory).is_complete


@pytest.mark.drill
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_loss_of_a_file_loses_no_step(stopped: Stopped, tmp_path: Path, lost: int) -> None:
    """The other two files have all parts; the random numbers of the rank whose file is gone are new, and told."""
    _, made = stopped()
    directory = tmp_path / "ckpt"
    shutil.copytree(made, directory)
    shutil.rmtree(directory / f"rank_{lost}")
    step = newest(directory)
    assert step.is_usable and step.candidate.lacks_rank_state
    resumed = run_job("loop.py", directory, ranks=RANKS, env=ALWAYS)
    assert resumed.matches(rf"READY \d+ \d+ {AT}"), resumed.report()
    told = rf"rank {lost} has no usable file of step {AT} .* its random numbers start over"
    assert resumed.matches(told), resumed.report()


@pytest.mark.drill
def test_a_stop_inside_an_accumulation_is_divided_too(tmp_path: Path) -> None:
    """It is agreed on for a step from which all go on to the end of the window."""
    directory = tmp_path / "ckpt"
    job = stop(directory, "--accumulate", 3)
    agreed = {event["step"] for event in events(directory, "agreement")}
    assert len(agreed) == 1 and agreed.pop() % 3, job.report()
    found = headers(directory)
    assert len(found) == RANKS and all(header.held is not None for header in found.values())
    assert {header.info.step for header in found.values()} == {9}


@pytest.mark.drill
@pytest.mark.parametrize(
    ("fault", "said", "args"),
    [
        ("save-killed:1", "KILLED", ()),
        ("save-killed:0", "KILLED", ("--remove-redundancy",)),
        ("save-full:0", "FULL 0", ()),
        ("save-stopped:1", "STOPPED 1", ("--grace-s", 12)),
    ],
)
def test_a_rank_that_fails_in_the_save_costs_nothing(
    tmp_path: Path, reference: Reference, fault: str, said: str, args: tuple[object, ...]
) -> None:
    """Shared memory has the random numbers of a rank without a file."""
    directory, memory = tmp_path / "ckpt", str(tmp_path / "shm")
    Path(memory).mkdir()
    job = stop(directory, *args, fault=fault, said=said, memory=memory)
    step = newest(directory)
    assert step.moment[2] == AT and step.is_usable, f"{step.why_incomplete}\n{job.report()}"
    assert_resumes_equal(directory, reference(RANKS), job, memory)
