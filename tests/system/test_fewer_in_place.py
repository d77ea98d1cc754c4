"""A place cannot be filled, and the survivors go on with fewer ranks in their processes; or the job restarts, and says
why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import Job, events
from tests.system.test_fewer_ranks import end, run, seen

pytestmark = pytest.mark.slow
drill = pytest.mark.drill

SHRINKS = ["--min-nproc", "2", "--regrow-after", "0", "--hang-timeout", "600"]
IN_PLACE = ["--recover", "in-place", "--rejoin-timeout", "120"]
WINDOW = ["--accumulate", "2", "--inside"]


def pids(job: Job) -> list[tuple[int, set[str]]]:
    """World size and processes of each time that all ranks have begun to train, the same ones once."""
    found: dict[int, set[str]] = {}
    for match in job.matches(r"^PID \d+ (\d+) (\d+)"):
        found.setdefault(int(match[1]), set()).add(match[2])
    return list(found.items())


def shrunk(folder: Path, *args: object, options: Sequence[str] = (), ranks: int = 3) -> Job:
    job = run(folder, ranks, *args, "--break", "2:8", options=[*SHRINKS, *options])
    assert job.matches("^FAULT 2 8"), job.report()
    return job


def test_survivors_keep_their_processes_and_are_what_a_restart_gives(tmp_path: Path) -> None:
    job = shrunk(tmp_path / "job", *WINDOW, options=IN_PLACE)
    assert job.matches("world 3 -> 2 in place"), job.report()
    (_, three), (_, two) = pids(job)
    assert len(two) == 2 and two < three, job.report()
    assert [event["world_size"] for event in events(tmp_path / "job" / "run", "shrink_in_place")] == [2]
    restarted = shrunk(tmp_path / "restarted", *WINDOW)
    assert (end(job), seen(job)) == (end(restarted), seen(restarted)), job.report()
    assert all(samples == list(range(90)) for samples in seen(job).values()), job.report()
    assert not list((tmp_path / "job" / "shm").glob("*/agent-*"))


@drill
def test_what_depends_on_the_number_of_ranks_is_named_and_restarts(tmp_path: Path) -> None:
    job = shrunk(tmp_path, "--accumulate", "2", options=IN_PLACE)
    assert job.matches("the program has asked for the number of ranks outside of the function.*fewer.py:"), job.report()
    (_, three), (_, two) = pids(job)
    assert len(two) == 2 and not two & three, job.report()
    assert all(samples == list(range(90)) for samples in seen(job).values()), job.report()


@drill
def test_a_death_meanwhile_restarts(tmp_path: Path) -> None:
    job = shrunk(tmp_path, *WINDOW, "--die-waiting", "1", options=IN_PLACE)
    assert job.matches("^DIES "), job.report()
    assert job.matches("the job is restarted"), job.report()
    (_, three), (_, two) = pids(job)
    assert not two & three, job.report()
    assert all(samples == list(range(90)) for samples in seen(job).values()), job.report()


@drill
def test_a_model_and_its_callbacks(tmp_path: Path) -> None:
    args = ["--accumulate", "2", "--inside", "--kind", "model"]
    job = shrunk(tmp_path / "job", *args, options=IN_PLACE)
    assert job.matches("world 3 -> 2 in place"), job.report()
    (_, three), (_, two) = pids(job)
    assert len(two) == 2 and two < three, job.report()
    restarted = shrunk(tmp_path / "restarted", *args)
    assert (end(job), seen(job)) == (end(restarted), seen(restarted)), job.report()


@drill
def test_with_a_smaller_rate(tmp_path: Path) -> None:
    args = ["--inside", "--size", "96"]
    job = shrunk(tmp_path / "job", *args, options=[*IN_PLACE, "--on-shrink", "scale-lr"])
    assert job.matches("world 3 -> 2 in place"), job.report()
    restarted = shrunk(tmp_path / "restarted", *args, options=["--on-shrink", "scale-lr"])
    assert (end(job), seen(job)) == (end(restarted), seen(restarted)), job.report()
