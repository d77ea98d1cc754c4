"""A small transformer goes on in another world than the one that was stopped, with files lost and damaged on the way.

Every update is over the same 12 samples in every world (fewer ranks accumulate more batches), so losses can be compared
with those of one uninterrupted run on 4 ranks:

* same ranks, every rank its own file: the same sums in the same order, so the same *bits* at the end;
* everything else: the state is put together bit for bit (``STATE`` lines: a hash over all weights and moments, the same
  before the stop and after the resume, whatever holds them), but from there on gradients are summed in another order:
  losses are equal within `CLOSE`, a hundred times less than what a lost optimizer or a repeated sample makes.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.storage import QUARANTINE
from tests.harness import Job, events, run_job, start_job

pytestmark = pytest.mark.slow
SIZE, STEPS = 60, 12  # samples; 5 updates an epoch
SAVED, STOPPED = 4, 7  # an older whole step in epoch 1, and the one at the SIGTERM, in epoch 2
CLOSE = 1e-5
drill = pytest.mark.drill


def drilled(*values: object) -> Any:
    return pytest.param(*values, marks=drill)


@dataclass
class Place:
    """A job's checkpoint directory and its own shared memory."""

    folder: Path

    def __post_init__(self) -> None:
        self.directory, self.memory = self.folder / "ckpt", self.folder / "shm"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.memory.mkdir(exist_ok=True)

    @contextmanager
    def start(self, kind: str, ranks: int, *args: object, torchrun: bool = False) -> Iterator[Job]:
        if kind in ("2d", "fsdp", "hsdp") and not hasattr(torch.cpu.Stream, "record_event"):
            pytest.skip("FSDP of torch 2.6 does not train on CPUs, nor split unevenly around tensor parallelism")
        env = {"MINDX_ARENA_DIR": str(self.memory)}
        forked = () if torchrun else ("--ranks", ranks)
        given = (kind, self.directory, *forked, *args)
        with start_job("transformer.py", *given, ranks=ranks if torchrun else 1, env=env) as job:
            yield job

    def run(self, kind: str, ranks: int, *args: object) -> Job:
        with self.start(kind, ranks, *args) as job:
            job.expect(0)
        assert not list(self.memory.iterdir()), f"something is left in memory\n{job.report()}"
        return job

    def stop(self, kind: str, ranks: int, *args: object) -> Job:
        """SIGTERM for one rank, in the middle of an epoch; an older whole step lies beside what is saved then."""
        options = ("--save-at", SAVED, "--hold-at", STOPPED - 1, *args)
        with self.start(kind, ranks, *options) as job:
            job.wait_for("HOLD", count=ranks)
            job.signal_rank(ranks - 1, signal.SIGTERM)
            job.expect(143)
            assert len(job.matches("Graceful exit is triggered, stop training.")) == 1
        saved = [read_header(path).info for path in self.directory.rglob("*.safetensors")]
        steps = {(info.rank, info.step) for info in saved}
        assert steps == {(rank, step) for rank in range(ranks) for step in (SAVED, STOPPED)}, job.report()
        return job

    def file(self, rank: int, step: int) -> Path:
        """The rank's file of a step; by its header, names are for people."""
        (found,) = [
            p for p in (self.directory / f"rank_{rank}").glob("*.safetensors") if read_header(p).info.step == step
        ]
        return found

    def quarantined(self) -> set[str]:
        return {path.name for path in (self.directory / QUARANTINE).rglob("*.safetensors")}


@dataclass(frozen=True)
class Stopped:
    """A job that was stopped once, for many tests: each works on a copy."""

    place: Place
    job: Job

    def copy(self, folder: Path) -> Place:
        shutil.copytree(self.place.folder, folder, dirs_exist_ok=True)
        return Place(folder)


Stops = Callable[..., Stopped]
Wholes = Callable[..., Job]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stops:
    """``stopped(kind, ranks, *args)``, once for each."""

    @cache
    def make(kind: str, ranks: int, *args: object) -> Stopped:
        place = Place(tmp_path_factory.mktemp(f"{kind}-{ranks}"))
        return Stopped(place, place.stop(kind, ranks, *args))

    return make


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    """``whole(kind, ranks)``: an uninterrupted run."""

    @cache
    def make(kind: str, ranks: int) -> Job:
        return Place(tmp_path_factory.mktemp("whole")).run(kind, ranks)

    return make


# --- what is compared ---


def losses(job: Job) -> dict[int, float]:
    return {int(m[1]): float(m[2]) for m in job.matches(r"LOSS (\d+) (\S+)")}


def states(job: Job) -> dict[int, set[str]]:
    """Hashes over the whole state, by step."""
    found: dict[int, set[str]] = {}
    for match in job.matches(r"STATE (\d+) (\w+)"):
        found.setdefault(int(match[1]), set()).add(match[2])
    return found


def seen(job: Job, upto: int = STEPS) -> Counter[tuple[int, int]]:
    """How often each sample of each epoch went into an update that counts: one up to step `upto`."""
    found: Counter[tuple[int, int]] = Counter()
    for match in job.matches(r"SEEN (\d+) ([\d,]+) step (\d+)"):
        if int(match[3]) <= upto:
            found.update((int(match[1]), int(index)) for index in match[2].split(","))
    return found


def assert_goes_on(step: int, before: Job, after: Job, reference: Job, *, exact: bool = False) -> None:
    """`after` went on from `step` of `before`: with its very state, with every sample once, on the same loss curve."""
    report = f"{before.report()}\n\n{after.report()}"
    assert set(after.resumed()) == {str(step)}, report
    assert states(after)[step] == states(before)[step], f"the state is not the saved one\n{report}"
    assert set(losses(after)) == set(range(step + 1, STEPS + 1)), report
    for number, loss in losses(after).items():
        assert loss == pytest.approx(losses(reference)[number], rel=0 if exact else CLOSE), f"step {number}\n{report}"
    if exact:
        assert states(after)[STEPS] == states(reference)[STEPS], report
    together = seen(before, step) + seen(after)
    every = Counter((epoch, index) for epoch in (1, 2) for index in range(SIZE))
    assert Counter({key: n for key, n in together.items() if key[0] <= 2}) == every, report


def hold_and_stop(place: Place, kind: str, ranks: int, hold: int, *args: object) -> Job:
    """SIGTERM while the job is held after step `hold`; it does one step more."""
    with place.start(kind, ranks, *args, "--hold-at", hold) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(ranks - 1, signal.SIGTERM)
        return job.expect(143)


def assert_one_after_the_other(jobs: list[Job], steps: list[int], reference: Job) -> None:
    """Each of `jobs` went on where the one before had stopped, `steps`; all together they are `reference`."""
    report = "\n\n".join(job.report() for job in jobs)
    for step, before, after in zip(steps, jobs, jobs[1:], strict=False):
        assert set(after.resumed()) == {str(step)}, report
        assert states(after)[step] == states(before)[step], f"weights and all moments, put together\n{report}"
    together = sum(map(seen, jobs), Counter[tuple[int, int]]())
    assert all(together[epoch, index] == 1 for epoch in (1, 2) for index in range(SIZE)), report
    curve = {step: loss for job in jobs for step, loss in losses(job).items()}
    assert curve == pytest.approx(losses(reference), rel=CLOSE), report


def flip_bit(path: Path) -> None:
    """In the data, which only the tensors' digests cover."""
    header = read_header(path)
    place = header.data_start + (header.file_size - header.data_start) // 2
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), place)


# --- FSDP2 x TP: no weight is on two ranks; and every other way of spreading the same weights ---


@drill
@pytest.mark.parametrize(
    ("kind", "ranks", "args"),
    [
        ("2d", 4, ()),
        ("2d", 2, ()),
        ("2d", 2, ("--tensor-parallel", 1)),
        ("2d", 4, ("--tensor-parallel", 1)),
        ("fsdp", 4, ()),
        ("hsdp", 4, ()),
        ("ddp", 2, ()),
        ("plain", 1, ()),
    ],
)
def test_a_state_of_two_dimensions_goes_on_in_another_world(
    tmp_path: Path, stopped: Stops, whole: Wholes, kind: str, ranks: int, args: tuple[object, ...]
) -> None:
    before = stopped("2d", 4)
    after = before.copy(tmp_path).run(kind, ranks, *args)
    same = (kind, ranks, args) == ("2d", 4, ())
    assert_goes_on(STOPPED, before.job, after, whole("2d", 4), exact=same)
    assert bool(after.matches("not bit for bit the uninterrupted run: ")) != same, after.report()
    assert {e["resharded"] for e in events(tmp_path / "ckpt", "resume")} == {not same}


@pytest.mark.parametrize(
    ("ranks", "lost", "damaged"),
    [
        (1, (), 1),
        *(drilled(ranks, (), 1) for ranks in (4, 2)),
        *(drilled(ranks, lost, None) for lost in ((1,), (2, 3), (1, 3)) for ranks in (4, 2, 1)),
    ],
)
def test_where_a_needed_file_is_lost_or_damaged_the_older_step_is_taken_whole(
    tmp_path: Path, stopped: Stops, whole: Wholes, ranks: int, lost: tuple[int, ...], damaged: int | None
) -> None:
    """(2, 3) are a node of tensor-parallel ranks, (1, 3) one of data-parallel ranks."""
    before = stopped("2d", 4)
    place = before.copy(tmp_path)
    for rank in lost:
        place.file(rank, STOPPED).unlink()
    if damaged is not None:
        bad = place.file(damaged, STOPPED)
        flip_bit(bad)
    after = place.run("2d", ranks)
    gone = damaged if damaged is not None else lost[-1]
    words = f"no usable file of rank {gone}, which held it" if len(lost) < 2 else f"rank {gone}"
    assert len(after.matches(f"step {STOPPED} is not used: .*{words}")) == 1, after.report()
    assert damaged is None or len(after.matches(f"{bad.name} is damaged")) == 1, after.report()
    assert place.quarantined() == ({bad.name} if damaged is not None else set()), after.report()
    assert_goes_on(SAVED, before.job, after, whole("2d", 4), exact=ranks == 4)


# --- HSDP: every shard is on two ranks ---


@drill
@pytest.mark.parametrize("ranks", [4, 2, 1])
@pytest.mark.parametrize("damage", [Path.unlink, flip_bit])
def test_hsdp_a_replica_stands_in_also_in_another_world(
    tmp_path: Path, stopped: Stops, whole: Wholes, damage: Callable[[Path], None], ranks: int
) -> None:
    before = stopped("hsdp", 4)
    place = before.copy(tmp_path)
    bad = place.file(0, STOPPED)
    damage(bad)
    after = place.run("hsdp", ranks)
    # A file that no rank has to read is not checked: with 1 rank the sound replica may be read in the first place.
    assert place.quarantined() <= ({bad.name} if damage is flip_bit else set())
    assert_goes_on(STOPPED, before.job, after, whole("hsdp", 4), exact=False)


# --- DDP and ZeRO-1: weights everywhere, the optimizer's state on one rank each ---

ONE = ("--batch-size", 1)  # 12 samples are then 3, 4, 6 or 12 batches for 4, 3, 2 or 1 ranks


@pytest.mark.parametrize("worlds", [(2, 3), drilled((4, 2, 3)), drilled((3, 1, 4))])
def test_zero_in_one_world_after_the_other(
    tmp_path: Path, stopped: Stops, whole: Wholes, worlds: tuple[int, ...]
) -> None:
    first = stopped("zero", worlds[0], *ONE)
    place, jobs, steps = first.copy(tmp_path), [first.job], [STOPPED]
    for ranks in worlds[1:-1]:
        jobs.append(hold_and_stop(place, "zero", ranks, steps[-1] + 1, *ONE))
        steps.append(steps[-1] + 2)
    jobs.append(place.run("zero", worlds[-1], *ONE))
    assert_one_after_the_other(jobs, steps, whole("2d", 4))
    change = f"{worlds[-2]} ranks become {worlds[-1]}: "
    notes = [str(read_header(path).info.unmanaged) for path in place.directory.rglob("*_final.safetensors")]
    assert notes and all(change in each for each in notes), "it is against all later files"


# --- the position in the data ---


@drill
def test_a_frozen_sharded_layer_that_has_kept_its_gradient(tmp_path: Path) -> None:
    """Its gradient has no layout: with other ranks it is left out, in words; with the same it is kept."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    args = ("--freeze-at", 2)
    with start_job("fsdp.py", tmp_path, *args, "--hold-at", 4, ranks=2) as job:
        job.wait_for("HOLD", count=2)
        job.signal_rank(0, signal.SIGTERM)
        job.wait()
    shutil.copytree(tmp_path, same := tmp_path.with_name("same"))
    again = run_job("fsdp.py", same, *args, ranks=2)
    assert not again.matches("keeps no layout"), again.report()
    other = run_job("fsdp.py", tmp_path, *args, env=alone)
    assert other.matches(r"WARNING .* keeps no layout for the gradient of 0.weight \(model\)"), other.report()
    assert other.matches(r"^DONE 0 \w+ 12"), other.report()
