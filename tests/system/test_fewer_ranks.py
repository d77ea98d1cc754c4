"""A dead rank cannot be replaced: the job goes on with fewer, and each sample of the epoch still comes once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.harness import Job, events, job_status, start_agent

pytestmark = pytest.mark.slow
drill = pytest.mark.drill


def run(
    folder: Path,
    ranks: int,
    *args: object,
    options: Sequence[str] = (),
    code: int = 0,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Job:
    (folder / "shm").mkdir(parents=True, exist_ok=True)
    env = {"MINDX_ARENA_DIR": str(folder / "shm"), **env}
    with start_agent("fewer.py", folder, *args, ranks=ranks, options=options, env=env, run_dir=folder / "run") as job:
        job.expect(code)
    return job


def seen(job: Job) -> dict[int, list[int]]:
    """The samples of each epoch, those of a step that was done again once: as the last world has seen them."""
    steps: dict[int, dict[tuple[int, str], int]] = {}
    worlds: dict[int, int] = {}
    for match in job.matches(r"SEEN (\d+) ([\d,]+) (\d+) (\d+) (\d+)"):
        epoch, samples, rank, step, world = int(match[1]), match[2], int(match[3]), int(match[4]), int(match[5])
        if worlds.setdefault(step, world) != world:
            worlds[step], steps[step] = world, {}
        steps.setdefault(step, {})[rank, samples] = epoch
    found: dict[int, list[int]] = {}
    for batches in steps.values():
        for (_, samples), epoch in batches.items():
            found.setdefault(epoch, []).extend(map(int, samples.split(",")))
    return {epoch: sorted(samples) for epoch, samples in found.items()}


def end(job: Job) -> tuple[str, int, float, str]:
    """Hash of the weights, last step, their sum, learning rate: the same on all ranks."""
    found = {match.groups() for match in job.matches(r"DONE \d+ (\w+) (\d+) ([\d.]+) (.*)")}
    assert len(found) == 1, job.report()
    digest, step, total, rate = found.pop()
    return digest, int(step), float(total), rate


def assert_near(job: Job, plain: Job) -> None:
    """The same updates of the same samples, but for the order of sums."""
    assert seen(job) == seen(plain), job.report()
    (_, step, total, rate), (_, same_step, same_total, same_rate) = end(job), end(plain)
    assert (step, rate) == (same_step, same_rate), job.report()
    assert total == pytest.approx(same_total, abs=1e-5), job.report()


def test_two_ranks_become_one_and_two_with_the_next_start(tmp_path: Path) -> None:
    """A sum of two is the same in any order, so the end is that of the undisturbed run to the bit."""
    plain = run(tmp_path / "plain", 2, "--size", 54)
    job = run(tmp_path / "job", 2, "--size", 54, "--break", "1:3", options=["--min-nproc", "1"])
    assert job.matches("^FAULT 1 3"), job.report()
    assert [match[1] for match in job.matches(r"READY 0 (\d)")] == ["2", "1"], job.report()
    assert (end(job), seen(job)) == (end(plain), seen(plain)), job.report()
    run_dir = tmp_path / "job" / "run"
    (shrink,) = events(run_dir, "shrink")
    assert shrink["world_size"] == 1 and "place 1: exit code 3" in shrink["reason"]
    records = job_status(run_dir)["attempts"]
    assert [(r["world_size"], r.get("full_size")) for r in records] == [(2, None), (2, None), (1, 2)]
    assert not list((tmp_path / "job" / "shm").glob("*/agent-*"))
    (tmp_path / "job" / "broken_1").unlink()
    job = run(tmp_path / "job", 2, "--size", 54, options=["--min-nproc", "1"])
    assert [match[1] for match in job.matches(r"READY 0 (\d)")] == ["2"], job.report()


@drill
@pytest.mark.parametrize(
    ("ranks", "there", "args"),
    [
        (4, 2, ["--break", "3:4"]),
        (4, 2, ["--break", "0:6", "--kind", "block"]),
        (4, 2, ["--break", "1:4,2:4"]),
        (4, 2, ["--break", "1:4", "--kind", "model", "--accumulate", "2"]),
        (4, 2, ["--break", "1:4", "--stock"]),
        (4, 2, ["--break", "1:4", "--stock", "--drop-last"]),
        (4, 3, ["--break", "1:5", "--accumulate", "3", "--each-batch"]),
        (3, 2, ["--break", "0:3", "--accumulate", "2", "--kind", "model"]),
        (3, 1, ["--break", "0:3", "--size", "31"]),
        (4, 2, ["--break", "3:4", "--kind", "fsdp"]),
    ],
)
def test_the_global_batch_stays(tmp_path: Path, ranks: int, there: int, args: list[str]) -> None:
    at = args.index("--break")
    plain = run(tmp_path / "plain", ranks, *args[:at], *args[at + 2 :])
    options = ["--min-nproc", "1", "--snapshot-every", "1", "--max-restarts", "5"]
    job = run(tmp_path / "job", ranks, *args, options=options)
    assert len(job.matches("^FAULT ")) == args[at + 1].count(":"), job.report()
    assert [match[1] for match in job.matches(r"READY 0 (\d)")] == [str(ranks), str(there)], job.report()
    assert_near(job, plain)


@drill
def test_it_is_bit_for_bit_what_a_start_by_hand_does(tmp_path: Path) -> None:
    args = ["--size", 96]
    run(tmp_path / "hand", 4, *args, "--stop-at", 2, code=75)
    hand = run(tmp_path / "hand", 2, *args, "--accumulate", 2)
    job = run(tmp_path / "job", 4, *args, "--break", "3:4", options=["--min-nproc", "2"])
    assert end(job) == end(hand), job.report()
    assert all(samples == list(range(96)) for samples in seen(job).values()), job.report()
