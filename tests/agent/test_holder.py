"""What the holder brings from memory to disk, what a start elsewhere makes of it, and what stays in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent import holder
from mindx_elastic.agent.holder import drop, flush
from mindx_elastic.config import RankInfo
from mindx_elastic.core.owners import find_owners
from mindx_elastic.errors import DirectoryInUseError
from mindx_elastic.memory import arena as arena_module
from mindx_elastic.memory.folders import rank_folders
from mindx_elastic.memory.memory_files import RING_COPY
from mindx_elastic.memory.one_step import newest_kept
from mindx_elastic.persist import directory_lock as lock_module
from mindx_elastic.persist import writer
from mindx_elastic.persist.directory_lock import hold_directory
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.reader import verify_file
from mindx_elastic.start.restore import Resumed
from tests.checkpoint_files import EPOCH_0, flip_bit_in_data, write
from tests.harness import start_code
from tests.start.arenas import HOLD_ARENA, RUN, Machine
from tests.start.finding import find_and_read
from tests.start.shared_store import on_all_ranks


class Job(Machine):
    """A machine whose workers are dead. `world_size` ranks in all; those that wrote something were here."""

    def __init__(self, folder: Path, world_size: int, *, replicas: bool = False) -> None:
        super().__init__(folder, world_size)
        self.coordinates = {"replicas": world_size} if replicas else {}
        self.know(RUN)

    def snapshot(self, step: int, **more: Any) -> None:
        super().snapshot(step, **{"coordinates": self.coordinates, **more})
        self.describe()

    def boundary(self, rank: int, step: int, **more: Any) -> None:
        super().boundary(rank, step, **more)
        self.describe()

    def describe(self) -> None:
        arena = self.arena(0)
        arena.describe(self.directory, RUN)
        arena.close()

    def saved(self, step: int, *, ranks: list[int] | None = None, **more: Any) -> None:
        """Files that the workers have written themselves."""
        for rank in range(self.world_size) if ranks is None else ranks:
            folder = self.directory / f"rank_{rank}" if self.world_size > 1 else self.directory
            facts = {"rank": rank, "world_size": self.world_size, "coordinates": self.coordinates, **more}
            write(folder / f"resnet-1_{step}.safetensors", step=step, **facts)

    def written(self) -> set[tuple[int, int, int]]:
        """Rank, attempt and step of the holder's files, all sound; and no half ones."""
        assert not list(self.directory.rglob("*.mindx-tmp"))
        found = set()
        for path in [*self.directory.glob("memory-*"), *self.directory.glob("rank_*/memory-*")]:
            assert verify_file(path) == []
            info = read_header(path).info
            assert path.parent == (self.directory / f"rank_{info.rank}" if self.world_size > 1 else self.directory)
            found.add((info.rank, info.attempt, info.step))
        return found

    def remembered(self) -> list[int]:
        """Ranks that are still in memory."""
        ranks = sorted(rank_folders(self.job))
        assert ranks or not list(self.base.iterdir()), "nothing is left"
        return ranks

    def start(self, *, here: bool = False) -> list[tuple[int, int | None, int | None]]:
        """What each rank goes on from, on this machine or on another one: the step, the donor, its own state's step."""
        found = on_all_ranks(
            self.world_size,
            lambda rank, exchange: find_and_read(
                [self.directory],
                RankInfo(rank=rank, world_size=self.world_size),
                exchange,
                resume="auto",
                arenas=self.job if here else None,
            ),
        )
        assert all(isinstance(one, Resumed) for one in found), found
        return [
            (one.checkpoint.info.step, one.donor, None if one.own is None else one.own.unpack()["rng"]["step"])
            for one in found
            if isinstance(one, Resumed)
        ]


@pytest.fixture
def alone(tmp_path: Path) -> Job:
    return Job(tmp_path, 1)


@pytest.fixture
def sharded(tmp_path: Path) -> Job:
    return Job(tmp_path, 2)


@pytest.fixture
def replicas(tmp_path: Path) -> Job:
    return Job(tmp_path, 3, replicas=True)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- nothing to do ---


def test_no_folder_one_that_the_workers_have_emptied_and_a_directory_that_is_gone(alone: Job) -> None:
    assert flush(alone.job).lines == []
    alone.snapshot(5)
    owner = (alone.job / "owner.json").read_bytes()
    (alone.job / "owner.json").unlink()
    assert flush(alone.job).lines == [] and alone.written() == set()
    (alone.job / "owner.json").write_bytes(owner)
    (alone.directory / "events.jsonl").unlink()
    alone.directory.rmdir()
    (line,) = flush(alone.job).lines
    assert "which is gone" in line and "clean" in line
    assert alone.remembered() == [0] and not alone.directory.exists()


@pytest.mark.parametrize("step", [9, 12])
def test_what_is_on_disk_already_is_not_written_again(sharded: Job, step: int) -> None:
    sharded.snapshot(8)
    sharded.snapshot(9)
    sharded.saved(step)
    before = files(sharded.directory)
    flushed = flush(sharded.job)
    assert (flushed.lines, flushed.step) == ([], None)
    assert files(sharded.directory) == before and sharded.remembered() == []


# --- one rank ---


@pytest.mark.parametrize("sealed", [False, True])
def test_the_newest_snapshot_is_written_as_it_is(alone: Job, sealed: bool) -> None:
    alone.saved(3)
    alone.snapshot(8)
    alone.snapshot(9, sealed=sealed)
    content = alone.slots(0)[1].read_bytes()
    flushed = flush(alone.job)
    path = alone.directory / "memory-1_9_breakpoint.safetensors"
    assert flushed.step == 9 and "step 9 (attempt 0) of rank 0 is written" in flushed.lines[0]
    assert alone.written() == {(0, 0, 9)} and alone.remembered() == []
    assert alone.start() == [(9, None, None)]
    assert not sealed or path.read_bytes() == content
    assert path.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("known", [["run-y"], ["run-x", "run-y"]])
def test_an_older_run_in_memory_is_dropped(alone: Job, known: list[str]) -> None:
    """It was further; then somebody has emptied the directory, or passed resume="never"."""
    (alone.directory / "events.jsonl").unlink()
    alone.know(*known)
    alone.snapshot(1000, run_id="run-x", created=EPOCH_0)
    alone.snapshot(10, run_id="run-y", created=EPOCH_0 + 3600)
    assert flush(alone.job).step == 10
    assert alone.written() == {(0, 0, 10)} and alone.remembered() == []
    assert alone.start() == [(10, None, None)]
    alone.snapshot(11, run_id="run-y", created=EPOCH_0 + 3600)
    alone.know("run-z")  # one that has started over, without snapshots
    alone.saved(2, run_id="run-z", created=EPOCH_0 + 7200)
    assert flush(alone.job).lines == [] and alone.remembered() == [] and alone.start() == [(2, None, None)]


def test_an_event_log_that_cannot_be_read_is_no_reason_to_drop_anything(alone: Job) -> None:
    alone.snapshot(9)
    (alone.directory / "events.jsonl").rename(alone.directory / "away")
    flushed = flush(alone.job)
    assert flushed.step is None and "does not know the run" in flushed.lines[0]
    assert alone.remembered() == [0] and alone.written() == set()
    (alone.directory / "away").rename(alone.directory / "events.jsonl")
    assert flush(alone.job).step == 9 and alone.remembered() == []


def test_a_snapshot_that_has_rotted_gives_way_to_the_older_one(alone: Job) -> None:
    alone.snapshot(8)
    alone.snapshot(9)
    flip_bit_in_data(alone.slots(0)[1])
    flushed = flush(alone.job)
    assert flushed.step == 8 and "does not match its digest" in flushed.lines[0]
    assert alone.written() == {(0, 0, 8)} and alone.remembered() == []


# --- replicas ---


@pytest.mark.parametrize(("older", "steps"), [(49, {49, 50}), (48, {48, 50}), (47, {50})])
def test_an_exact_step_just_before_an_inexact_one_goes_along(replicas: Job, older: int, steps: set[int]) -> None:
    """Rank 2 was killed before it came to step 50."""
    replicas.snapshot(older, ranks=[0])
    replicas.snapshot(50, ranks=[0])
    for rank, reached in ((1, 50), (2, older)):
        for step in range(older, reached + 1):
            replicas.boundary(rank, step)
    expected = replicas.start(here=True)
    assert flush(replicas.job).step == 50
    assert {step for _, _, step in replicas.written()} == steps
    assert replicas.start() == expected and replicas.remembered() == []


@pytest.mark.parametrize(
    ("facts", "attempt", "forecast", "steps"),
    [
        ({"base_attempt": 0, "base_step": 49}, 1, False, (49, {49})),
        ({}, 1, False, (50, set())),
        ({}, 0, True, (50, set())),
        ({"foreseen": 0}, 0, True, (49, {49})),
    ],
    ids=["where the attempt began", "another attempt", "a forecast", "one that did not come true"],
)
def test_the_step_before_the_one_that_the_others_have_saved_goes_along_where_a_start_takes_it(
    replicas: Job, facts: dict[str, int], attempt: int, forecast: bool, steps: tuple[int, set[int]]
) -> None:
    """Rank 0 was killed in step 50; step 49 is in memory only."""
    replicas.snapshot(49, ranks=[0])
    for rank in (1, 2):
        replicas.boundary(rank, 49)
    if forecast:
        replicas.boundary(0, 50, forecast=True)
    replicas.saved(50, ranks=[1, 2], attempt=attempt, coordinates={**replicas.coordinates, **facts})
    expected = replicas.start(here=True)
    assert {step for step, _, _ in expected} == {steps[0]}
    flush(replicas.job)
    assert {step for _, _, step in replicas.written()} == steps[1]
    assert replicas.start() == expected and replicas.remembered() == []


def test_rings_without_any_snapshot(replicas: Job) -> None:
    """`--snapshot-every 0`; a ring of a run that nobody knows is none."""
    replicas.saved(50, ranks=[1])
    replicas.boundary(0, 50)
    replicas.boundary(2, 50, run="other")
    assert flush(replicas.job).lines == []
    assert [path.parent.name for path in replicas.directory.rglob(RING_COPY)] == ["rank_0"]
    assert replicas.start()[0] == (50, 1, 50) and replicas.remembered() == []


# --- shards ---


def test_a_torn_step_stays_in_memory_and_the_one_before_is_written(sharded: Job) -> None:
    sharded.snapshot(8)
    sharded.snapshot(9, ranks=[0])
    flushed = flush(sharded.job)
    assert flushed.step == 8 and sharded.written() == {(0, 0, 8), (1, 0, 8)}
    assert "memory of rank 0 is kept: its step 9 is newer" in flushed.lines[-1]
    assert "and rank 1 cannot give it" in flushed.lines[-1]
    assert sharded.remembered() == [0] and (sharded.job / "owner.json").exists()
    assert sharded.start() == sharded.start(here=True) == [(8, None, None)] * 2


def test_shards_that_make_no_step_are_not_written(sharded: Job) -> None:
    """A start would refuse to start over with them."""
    sharded.snapshot(9, ranks=[0])
    sharded.arena(1).close()
    flushed = flush(sharded.job)
    assert sharded.written() == set() and flushed.step is None
    assert "rank 0 is kept" in flushed.lines[-1] and sharded.remembered() == [0]


def test_with_ranks_on_other_machines_all_that_may_be_common(tmp_path: Path) -> None:
    job = Job(tmp_path, 4)
    job.saved(7)
    job.snapshot(8, ranks=[0, 1])
    job.snapshot(9, ranks=[0, 1])
    assert flush(job.job).step == 9
    assert job.written() == {(rank, 0, step) for rank in (0, 1) for step in (8, 9)} and job.remembered() == []
    assert job.start() == [(7, None, None)] * 4
    job.saved(8, ranks=[2, 3])  # what the other machine had
    assert job.start() == [(8, None, None)] * 4


def test_copies_of_another_nodes_rank_go_along_and_hold_nothing_back(tmp_path: Path) -> None:
    """The newest copy is a step behind, or ahead."""
    for number, copied in enumerate(([6, 7], [8, 9])):
        (tmp_path / str(number)).mkdir()
        job = Job(tmp_path / str(number), 2)
        for step in (7, 8):
            job.snapshot(step, ranks=[0])
        for step in copied:
            job.snapshot(step, ranks=[1])
        own = job.arena(0)
        own.of_neighbour(1).close()
        own.close()
        assert newest_kept(job.job) == (0, 8)
        assert flush(job.job).step == 8
        common = {7, 8}.intersection(copied)
        assert job.written() == {(0, 0, 8), *((rank, 0, step) for rank in (0, 1) for step in common)}
        assert job.remembered() == []


# --- what must not be lost ---


def disk_full(after: int) -> Callable[[int, int], bool]:
    calls = []

    def preallocate(fd: int, nbytes: int) -> bool:
        calls.append(nbytes)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    return preallocate


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_costs_nothing(sharded: Job, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    sharded.saved(7)
    for rank in (0, 1):
        path = sharded.directory / f"rank_{rank}" / "memory-1_9_breakpoint.safetensors"
        write(path, step=9, rank=rank, world_size=2, run_id="older", created=EPOCH_0 - 1000)
    sharded.snapshot(9)
    on_disk, in_memory = files(sharded.directory), files(sharded.job)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "preallocate", disk_full(after))
        flushed = flush(sharded.job)
    assert flushed.step is None and "No space left on device" in flushed.lines[-1] and "is kept" in flushed.lines[-1]
    assert sharded.remembered() == [0, 1] and files(sharded.job) == in_memory
    now = files(sharded.directory).values()
    assert len(now) == len(on_disk) + after and all(content in now for content in on_disk.values())
    assert sharded.start(here=True) == [(9, None, None)] * 2
    assert flush(sharded.job).step == 9, "there is room again"
    assert sharded.remembered() == [] and sharded.start() == [(9, None, None)] * 2


def test_a_ring_that_cannot_be_copied_keeps_the_memory_and_no_snapshot_from_the_disk(
    replicas: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas.snapshot(9, ranks=[0])
    replicas.boundary(1, 9)
    (replicas.directory / "rank_1" / RING_COPY).mkdir(parents=True)
    flushed = flush(replicas.job)
    assert replicas.written() == {(0, 0, 9)} and flushed.step == 9
    assert RING_COPY in flushed.lines[-1] and replicas.remembered() == [0, 1]


@contextmanager
def in_use(job: Job, rank: int) -> Iterator[None]:
    """Another process holds the rank's arena."""
    with start_code(HOLD_ARENA, job.base, job.directory, rank) as (_, output):
        assert output.readline() == "held\n"
        yield


def test_an_arena_in_use_is_kept_and_a_replicas_is_written(replicas: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_PREDECESSOR_S", 0.05)
    replicas.snapshot(9, ranks=[0])
    replicas.boundary(1, 9)
    with in_use(replicas, 1):
        flushed = flush(replicas.job)
    assert "memory of rank 1 is kept" in flushed.lines[0] and "is in use by another process" in flushed.lines[0]
    assert replicas.written() == {(0, 0, 9)} and replicas.remembered() == [1]
    assert replicas.start(here=True)[1] == (9, 0, 9), "with its own state"


# --- whose files count, and who else is there ---


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_files_of_users_who_are_named_count_as_for_a_start(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    alone.snapshot(9)
    alone.saved(5)
    for path in (alone.directory / "events.jsonl", alone.directory / "resnet-1_5.safetensors"):
        os.chown(path, 65533, -1)
    flushed = flush(alone.job)
    assert "MINDX_TRUSTED_USERS" in flushed.lines[0] and alone.remembered() == [0] and alone.written() == set()
    monkeypatch.setenv("MINDX_TRUSTED_USERS", "65533")
    assert flush(alone.job).step == 9 and alone.remembered() == []


def test_a_start_elsewhere_waits_until_all_is_written(sharded: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded.snapshot(9)
    real, refused = holder._write, []

    def write_it(*args: Any, **more: Any) -> None:
        monkeypatch.setattr(lock_module, "_MARGIN_S", -holder._LASTS_S)  # that start's patience is over
        with pytest.raises(DirectoryInUseError) as caught:
            hold_directory(sharded.directory, RankInfo(world_size=2), find_owners(sharded.directory), grace_s=0.0)
        refused.append(caught.value.pid)
        real(*args, **more)

    monkeypatch.setattr(holder, "_write", write_it)
    flushed = flush(sharded.job)
    assert refused == [os.getpid()] and flushed.step == 9, flushed
    lock = hold_directory(sharded.directory, RankInfo(world_size=2), find_owners(sharded.directory), grace_s=0.0)
    assert lock is not None, "given back"
    lock.close()


def test_a_directory_that_another_job_has_taken_meanwhile_is_named_and_nothing_is_lost(
    sharded: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "_PATIENCE_S", 0.05)
    sharded.snapshot(9)
    owners = find_owners(sharded.directory)
    other = hold_directory(sharded.directory, RankInfo(rank=1, world_size=2), owners, grace_s=0.0)
    assert other is not None
    flushed = flush(sharded.job)
    assert f"in use by rank 1 of another job, process {os.getpid()}" in flushed.lines[0]
    assert "goes on from an older one" in flushed.lines[0] and flushed.step == 9
    assert sharded.written() == {(0, 0, 9), (1, 0, 9)} and sharded.remembered() == []
    other.close()


# --- a job that has finished ---


def test_drop_writes_nothing(sharded: Job) -> None:
    sharded.snapshot(9)
    drop(sharded.job)
    assert sharded.remembered() == [] and sharded.written() == set()
    drop(sharded.job)
