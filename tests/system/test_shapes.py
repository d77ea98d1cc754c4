"""Programs as people write them lose a rank that cannot be replaced: they go on in their processes as a restart would,
or restart with the reason. Nothing of theirs is silently that of the larger job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness import Job, events, start_agent
from tests.system.test_fewer_in_place import pids
from tests.system.test_fewer_ranks import end, seen
from tests.system.test_in_recovery import fill

pytestmark = pytest.mark.slow
few = pytest.mark.few(1)

OPTIONS = ["--recover", "in-place", "--rejoin-timeout", "120", "--regrow-after", "0", "--hang-timeout", "600"]


def run(
    folder: Path,
    shape: str,
    *args: object,
    ranks: int = 3,
    least: int = 2,
    breaks: str = "2:8",
    options: Sequence[str] = (),
    in_place: bool = True,
    code: int = 0,
    meanwhile: Callable[[Job], None] = lambda job: None,
) -> Job:
    (folder / "shm").mkdir(parents=True, exist_ok=True)
    env = {"MINDX_ARENA_DIR": str(folder / "shm"), "MINDX_SHRINK_IN_PLACE": "" if in_place else "0"}
    args = (shape, *args, "--break", breaks)
    all_options = [*OPTIONS, "--min-nproc", str(least), *options]
    with start_agent(
        "shapes.py", folder, *args, ranks=ranks, options=all_options, env=env, run_dir=folder / "run"
    ) as job:
        meanwhile(job)
        job.expect(code)
    assert len(job.matches("^FAULT ")) >= len([*filter(None, breaks.split(","))]), job.report()
    assert not list((folder / "shm").glob("*/agent-*"))
    return job


# Compared are jobs that draw nothing (--calm): a rank that was a step behind when another one died has no file of the
# saved step, and draws other numbers in each job.


def went_in_place(job: Job) -> bool:
    (_, before), *_, (_, after) = pids(job)
    assert after <= before or not after & before, job.report()
    return after <= before


KEPT = "the program keeps a DistributedSampler that was made for 3 ranks"
STREAM = r"the program keeps a generator that has asked for rank or number of ranks \(shapes\.py:\d+\)"


def nothing_is_stale(job: Job) -> bool:
    """Of all that trained: the number of ranks that the program has, and the true one. Those that had not made a step
    when they ended do not count."""
    return all(match[1] == match[2] for match in job.matches(r"^WORLD (\d+) (\d+)"))


@few
@pytest.mark.parametrize("shape", ["plain", "validation", "anew", "logged", "rank", "workers", "log", "thread"])
def test_it_goes_on_in_place_as_a_restart_does(tmp_path: Path, shape: str) -> None:
    job = run(tmp_path / "job", shape, "--calm")
    assert went_in_place(job), job.report()
    assert events(tmp_path / "job" / "run", "shrink_in_place"), job.report()
    restarted = run(tmp_path / "restarted", shape, "--calm", in_place=False)
    assert not went_in_place(restarted), restarted.report()
    assert (end(job), seen(job)) == (end(restarted), seen(restarted)), job.report() + restarted.report()
    assert all(samples == list(range(96)) for samples in seen(job).values()), job.report()
    assert nothing_is_stale(job), job.report()


OUTSIDE = "the program has asked for the number of ranks outside of the function of guard.run"
ONCE = "the program has asked for the number of ranks in one step only, and may keep the answer"


@few
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("world", OUTSIDE),
        ("closure", OUTSIDE),
        ("environment", OUTSIDE),
        ("sampler", OUTSIDE),
        ("length", OUTSIDE),
        ("lazy", ONCE),
        ("cached", ONCE),
        ("attribute", ONCE),
    ],
)
def test_it_restarts_and_says_why(tmp_path: Path, shape: str, reason: str) -> None:
    job = run(tmp_path, shape)
    assert not went_in_place(job), job.report()
    assert job.matches(rf"rank \d cannot go on in its process with fewer ranks: {reason} \(shapes\.py:\d+\)"), (
        job.report()
    )
    assert all(samples == list(range(96)) for samples in seen(job).values()), job.report()
    assert nothing_is_stale(job), job.report()


@few
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("by_task", KEPT),
        ("stream", STREAM),
        ("compiled", "torch.compile has compiled part of the training"),
        ("threads", "the training has changed the number of torch's threads"),
    ],
)
def test_what_no_question_tells_restarts(tmp_path: Path, shape: str, reason: str) -> None:
    """The first two ask again and again, the others never."""
    job = run(tmp_path, shape, "--calm")
    assert not went_in_place(job), job.report()
    assert job.matches(rf"rank \d cannot go on in its process with fewer ranks: {reason}"), job.report()
    assert nothing_is_stale(job), job.report()


@few
@pytest.mark.parametrize("shape", ["kept", "counted"])
def test_what_is_kept_from_one_call_to_the_next_is_found_before_the_first_update(tmp_path: Path, shape: str) -> None:
    job = run(tmp_path / "job", shape, "--calm")
    kept = r"the program has not asked again for the number of ranks, and may keep the last answer \(shapes\.py:\d+\)"
    assert job.matches(f"this process cannot go on as a rank of a smaller job: {kept}"), job.report()
    assert len([match for match in job.matches(r"^WORLD (\d+) (\d+)") if match[1] != match[2]]) >= 1, job.report()
    restarted = run(tmp_path / "restarted", shape, "--calm", in_place=False)
    assert nothing_is_stale(restarted), restarted.report()
    assert (end(job), steps_of(job)) == (end(restarted), steps_of(restarted)), job.report() + restarted.report()


def steps_of(job: Job) -> set[tuple[str, ...]]:
    """What was trained on, once: a process that ends before its first update has seen its batch in vain."""
    return {match.groups() for match in job.matches(r"^SEEN (\d+) (\S+) (\d) (\d+) (\d)")}


@pytest.mark.drill
@pytest.mark.parametrize(
    ("ranks", "least", "breaks", "dies", "options", "sizes"),
    [
        (3, 2, "0:8", "", [], [3, 2]),
        (3, 2, "2:8", "1:4", [], [3, 2]),
        (4, 3, "1:7", "", ["--on-shrink", "scale-lr"], [4, 3]),
        (4, 2, "3:7", "", [], [4, 2]),
        (4, 2, "0:5", "", [], [4, 2]),
        (4, 1, "3:5,1:9", "", ["--on-shrink", "scale-lr", "--max-restarts", "6"], [4, 3, 2]),
        (3, 1, "2:5,0:9", "", ["--max-restarts", "6"], [3, 2, 1]),
    ],
)
def test_sizes(
    tmp_path: Path, ranks: int, least: int, breaks: str, dies: str, options: list[str], sizes: list[int]
) -> None:
    words = ["--calm", "--dies", dies, *(["--layer"] if "scale-lr" in options else [])]
    settings = {"ranks": ranks, "least": least, "breaks": breaks, "options": options}
    job = run(tmp_path / "job", "plain", *words, **settings)  # type: ignore[arg-type]
    assert [size for size, _ in pids(job)] == sizes, job.report()
    assert went_in_place(job), job.report()
    restarted = run(tmp_path / "restarted", "plain", *words, in_place=False, **settings)  # type: ignore[arg-type]
    assert (end(job), seen(job)) == (end(restarted), seen(restarted)), job.report() + restarted.report()
    assert all(samples == list(range(96)) for samples in seen(job).values()), job.report()


@pytest.mark.drill
def test_a_new_process_that_does_not_come_in_time(tmp_path: Path) -> None:
    options = ["--rejoin-timeout", "12"]
    job = run(tmp_path / "job", "plain", "--calm", "--hangs", options=options)
    assert job.matches("rank 2: its new process has not come within 12 s"), job.report()
    assert [size for size, _ in pids(job)] == [3, 2] and went_in_place(job), job.report()
    restarted = run(tmp_path / "restarted", "plain", "--calm", in_place=False)
    assert (end(job), seen(job)) == (end(restarted), seen(restarted)), job.report() + restarted.report()


@pytest.mark.drill
def test_a_stop_while_they_wait(tmp_path: Path) -> None:
    """The job ends with its last step saved, and the same command goes on with all ranks."""
    job = run(tmp_path, "plain", "--term-waiting", code=75)
    assert len(job.matches("^TERM ")) == 1 and job.matches("the job has stopped: SIGTERM"), job.report()
    (tmp_path / "broken_2").unlink()
    again = run(tmp_path, "plain", breaks="")
    assert again.matches("^READY 0 3 7"), again.report()
    steps = {int(match[1]) for match in again.matches(r"^SEEN \d+ \S+ \d (\d+) 3")}
    assert steps == set(range(8, 13)), again.report()


@pytest.mark.drill
def test_the_disk_is_full(tmp_path: Path) -> None:
    """The boundary stays in memory, and the same command goes on from there once there is room."""
    disk = tmp_path / "ckpt"
    disk.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=4M,mode=700 tmpfs {disk}") != 0:
        pytest.skip("a file system of a given size needs root")

    def go_when_it_is_full(job: Job) -> None:
        job.wait_for("^HOLD", 1)
        fill(disk)
        (tmp_path / "go").touch()

    try:
        run(tmp_path, "plain", "--hold", code=1, meanwhile=go_when_it_is_full)
        for file in disk.glob("filler*"):
            file.unlink()
        (tmp_path / "broken_2").unlink()
        again = run(tmp_path, "plain", breaks="")
        assert again.matches("^READY 0 3 7"), again.report()
    finally:
        os.system(f"umount {disk}")
