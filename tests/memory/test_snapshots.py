"""Snapshots beside the training, and when they are taken."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.store_exchange import StoreExchange
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.guard.saver import Saver
from mindx_elastic.memory import snapshots
from mindx_elastic.memory.arena import RankArena, SlotRecord, SlotState
from mindx_elastic.memory.snapshot_schedule import SnapshotSchedule
from mindx_elastic.memory.snapshots import Snapshotter, adopt_slots, copy_snapshot, lay_out, seal_slot
from mindx_elastic.persist.reader import map_checkpoint, read_checkpoint
from mindx_elastic.persist.writer import write_checkpoint
from tests.checkpoint_files import STATE, info_of
from tests.harness import events, wait_until
from tests.persist.states import assert_same

WAIT_S = 120.0


class Worker:
    """A rank without a guard: the test is its training thread."""

    def __init__(
        self, stack: ExitStack, folder: Path, every: int | None, exchange: Exchange, rank: int = 0, **more: Any
    ) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.01)
        self.collector = Collector({"model": self.network, "optimizer": self.optimizer})
        self.events = EventLog(folder / "events.jsonl", rank=rank)
        self.events.run_id = "run-a"
        (folder / "shm").mkdir(exist_ok=True)
        self.arena = RankArena(folder / "shm", folder, rank)
        stack.callback(self.arena.close)
        self.gate = UpdateGate()
        self.gate.watch(self.collector.parameters)
        stack.callback(self.gate.unwatch)
        self.folder = folder
        saver = Saver(self.collector, RankInfo(), self.events)
        self.told: list[int] = []
        self.snapshotter = Snapshotter(
            self.arena,
            self.collector,
            self.gate,
            SnapshotSchedule(every),
            lambda: saver.describe("snapshot"),
            exchange,
            self.events,
            tell=self.told.append,
            **more,
        )
        stack.callback(self.snapshotter.close)
        self.step = 0
        self.boundaries: dict[int, Any] = {}

    def forward(self) -> None:
        self.network(torch.randn(8, 4)).sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def boundary(self, *, closely: bool = True) -> None:
        self.step += 1
        position = Position(self.step, 1, self.step, 100)
        self.gate.pass_boundary(lambda: self.collector.copy(position), closely=closely)
        self.boundaries[self.step] = copy_tree(self.collector.state())
        self.snapshotter.at_boundary(self.step)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.forward()
            self.update()
            self.boundary()

    def measure(self, cost_s: float) -> None:
        """As many steps and snapshots as an interval takes."""
        for extra in [False] * 8 + [True] * 5:
            self.snapshotter.schedule.note(1.0 + cost_s * extra, extra=extra)

    def kept(self) -> list[int]:
        """Steps in the arena, all of them exact; as the next process finds them."""
        self.snapshotter.drain(WAIT_S)
        assert adopt_slots(self.arena) == []
        steps = []
        for slot in self.arena.slots:
            if slot.path.exists():
                checkpoint = read_checkpoint(slot.path)
                assert_same(checkpoint.state, self.boundaries[checkpoint.info.step])
                steps.append(checkpoint.info.step)
        return sorted(steps)

    def outcomes(self) -> list[str]:
        path = self.folder / "events.jsonl"
        return [event["outcome"] for event in events(self.folder, "snapshot")] if path.exists() else []


Make = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:
        torch.set_num_threads(1)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        yield lambda every, **more: Worker(stack, tmp_path, every, **{"exchange": Exchange(), **more})


class Stop:
    """Holds the copier at a stage until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
        self.reached, self.go, self.stage = threading.Event(), threading.Event(), stage
        monkeypatch.setattr(snapshots, "reach", self._reach)

    def _reach(self, stage: str) -> None:
        if stage == self.stage and not self.go.is_set():
            self.reached.set()
            assert self.go.wait(WAIT_S)


# --- what is kept ---


@pytest.mark.parametrize(("every", "kept"), [(1, [6, 7]), (2, [4, 6]), (5, [5]), (100, [])])
def test_the_last_two_are_kept_and_exact(make: Make, every: int, kept: list[int]) -> None:
    worker = make(every)
    worker.train(7)
    assert worker.kept() == kept
    assert worker.outcomes() == [] and not worker.snapshotter.broken


# --- overlap ---


def test_forward_goes_on_and_the_update_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(2)
    stop = Stop(monkeypatch, "copying")
    worker.train(2)
    assert stop.reached.wait(WAIT_S)
    worker.forward()  # BatchNorm's buffers and the random generators go on
    worker.forward()
    weights = copy_tree(worker.collector.state()["model"])
    updated = threading.Event()

    def update() -> None:
        worker.update()
        updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    wait_until(lambda: worker.gate._writers == 1, "the update at the gate")
    assert not updated.wait(0.05)
    assert_same(worker.collector.state()["model"], weights)
    stop.go.set()
    thread.join(WAIT_S)
    assert updated.is_set() and worker.gate.waited_s > 0
    worker.boundary()
    assert worker.kept() == [2]


def test_closing_breaks_the_digests_off_and_finishes_the_copy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(2)
    stop = Stop(monkeypatch, "copying")
    worker.train(2)
    assert stop.reached.wait(WAIT_S)
    closer = threading.Thread(target=worker.snapshotter.close)
    closer.start()
    wait_until(lambda: worker.snapshotter._closed, "the close")
    stop.go.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert worker.arena.newest().state is SlotState.COPIED
    assert worker.kept() == [2]


# --- updates that no optimizer makes ---


def test_a_change_by_hand_during_the_copy_is_never_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(2)
    worker.train(2)
    worker.snapshotter.drain(WAIT_S)
    stop = Stop(monkeypatch, "copying")
    worker.train(2)
    assert stop.reached.wait(WAIT_S)
    with torch.no_grad():
        worker.network[0].weight.mul_(0.5)  # type: ignore[operator]
    stop.go.set()
    worker.snapshotter.drain(WAIT_S)
    assert worker.kept() == [2]
    assert worker.outcomes() == [
        "dropped: 1 parameters were changed in place since the boundary, outside any optimizer"
    ]


def test_a_step_that_is_not_as_those_before_is_kept_at_its_end(make: Make) -> None:
    """The counters of its tensors are not as they were worked out (weights that are clipped now and then)."""
    worker = make(every=1)
    for step in range(1, 13):
        worker.forward()
        worker.update()
        if step == 10:
            with torch.no_grad():
                next(worker.network.parameters()).clamp_(-0.1, 0.1)
        worker.boundary(closely=step < 5)
        if step == 10:
            assert worker.kept() == [9, 10]
    assert worker.outcomes() == []


def test_a_program_that_updates_by_hand_gets_its_copies_before_the_step_ends(make: Make) -> None:
    worker = make(2)

    def update() -> None:
        with torch.no_grad():
            for parameter in worker.network.parameters():
                parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
                parameter.grad = None

    worker.update = update  # type: ignore[method-assign]
    for step in range(1, 7):
        worker.train(1)
        assert worker.arena.newest().step == (step - step % 2 or -1), "there before the next step can change anything"
    assert worker.gate.unguarded
    assert worker.kept() == [4, 6]


# --- failures ---


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("a bug")], ids=str)
def test_trouble_is_said_once_and_training_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, every: int, error: Exception
) -> None:
    worker = make(every)
    worker.train(2)
    assert worker.kept() == ([1, 2] if every == 1 else [2])
    fired = []

    def fail(*args: object) -> None:
        fired.append(args)
        raise error

    monkeypatch.setattr(os, "posix_fallocate", fail)
    worker.network.register_buffer("more", torch.zeros(100_000))
    worker.train(5)
    assert len(fired) == 1 and worker.snapshotter.broken
    assert caplog.text.count("training goes on without snapshots") == 1
    assert ("no room for a snapshot" in caplog.text) == isinstance(error, OSError)
    assert [outcome[:7] for outcome in worker.outcomes()] == ["failed:"]
    assert worker.kept() == [2], "what was there is still good"
    with worker.gate.hold(0.0):
        assert not worker.snapshotter.keep(WAIT_S, whole=True)


# --- the interval of all ranks ---


@pytest.fixture
def exchanges() -> Iterator[list[StoreExchange]]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)

    def connect() -> Any:
        return dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30))

    found = [StoreExchange(connect, rank=rank, world_size=3) for rank in range(3)]
    yield found
    for exchange in found:
        exchange.close()


def test_ranks_agree_on_the_rarest_interval(make: Make, exchanges: list[StoreExchange]) -> None:
    workers = [make(None, exchange=exchange, rank=rank) for rank, exchange in enumerate(exchanges)]
    for rank, worker in enumerate(workers):
        worker.measure(0.1 * rank)
    threads = [threading.Thread(target=worker.train, args=(1,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [worker.snapshotter.schedule.every for worker in workers] == [32, 32, 32]
    assert [worker.told for worker in workers] == [[32]] * 3, "for the agent's status"
    assert [event["outcome"] for event in events(workers[0].folder, "snapshot_every")] == ["32"] * 3


@pytest.mark.parametrize("all_alike", [True, False])
def test_a_rank_without_snapshots_is_named_where_the_others_need_them(
    make: Make, exchanges: list[StoreExchange], all_alike: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair = [make(None, exchange=exchanges[rank], rank=rank, all_alike=all_alike) for rank in (0, 1)]
    exchanges[2].tell("snapshot_every", snapshots.NO_SNAPSHOTS)
    threads = []
    for worker in pair:
        worker.measure(0.0)
        threads.append(threading.Thread(target=worker.train, args=(1,)))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert [worker.snapshotter.schedule.every for worker in pair] == [2, 2]
    assert caplog.text.count("no snapshots are taken of rank 2") == (not all_alike)


def test_ranks_that_cannot_agree_take_no_snapshots(
    make: Make, exchanges: list[StoreExchange], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With different intervals no step would be whole, and the older common ones would be overwritten."""
    monkeypatch.setattr(snapshots, "_AGREEMENT_S", 0.05)
    worker = make(None, exchange=exchanges[0])
    worker.measure(0.0)
    worker.train(1)
    assert worker.snapshotter.schedule.every == 0
    assert "could not agree" in caplog.text


def test_a_dead_rank_is_not_waited_for(
    make: Make, exchanges: list[StoreExchange], caplog: pytest.LogCaptureFixture
) -> None:
    """The recovery in place, or the stop, waits for the training thread."""
    caplog.set_level(logging.INFO)
    died = threading.Event()
    exchanges[0].gone = lambda: [2] if died.is_set() else []
    worker = make(None, exchange=exchanges[0])
    worker.measure(0.0)
    thread = threading.Thread(target=worker.train, args=(1,))
    thread.start()
    wait_until(lambda: exchanges[1].try_collect("snapshot_every", [0]) is not None, "the proposal")
    assert thread.is_alive()
    died.set()
    thread.join(10)  # half as long as it would wait for a late one
    assert not thread.is_alive() and worker.snapshotter.schedule.every == 0
    assert "do not agree on a snapshot interval: rank 2 is gone" in caplog.text


# --- when snapshots are due, and how an interval is found that costs less than a percent ---


def train(schedule: SnapshotSchedule, steps: range, *, step_s: float, cost_s: float) -> list[int]:
    """Play the training thread; the steps that were due."""
    taken = []
    extra = False
    for step in steps:
        if step > steps.start:
            schedule.note(step_s + cost_s * extra, extra=extra)
        extra = schedule.due(step)
        if extra:
            taken.append(step)
    return taken


@pytest.mark.parametrize("every", [1, 3, 0, None])
def test_a_boundary_that_has_got_more_is_kept_again_if_it_was_kept(every: int | None) -> None:
    schedule = SnapshotSchedule(every)
    for step in range(1, 30):
        assert schedule.due(step) == schedule.due(step) == schedule.due(step)
    assert not SnapshotSchedule(1, start=5).due(5)  # what was resumed from


@given(st.floats(0, 100))
def test_a_measured_interval_is_the_least_power_of_two_that_costs_less_than_a_percent(cost_s: float) -> None:
    schedule = SnapshotSchedule(None, start=102)
    taken = train(schedule, range(103, 160), step_s=1.0, cost_s=cost_s)
    assert taken == [114, 118, 122, 126, 130], "the same steps on all ranks, and no more of them"
    interval = schedule.proposal()
    assert interval is not None and interval.bit_count() == 1 and 2 <= interval <= 1 << 14
    assert cost_s / interval <= 0.0075 or interval == 1 << 14
    assert interval == 2 or 2 * cost_s / interval > 0.0075
    assert schedule.proposal(10.0) == max(interval, 32), "a copy must reach another node in half of the interval"
    schedule.agree([2, 64, interval])
    every = max(64, interval)
    assert [s for s in range(160, 3 * every) if schedule.due(s)] == [s for s in range(160, 3 * every) if s % every == 0]
    assert not schedule.synchronous and schedule.proposal() is None
    schedule.note(100.0, extra=True)
    assert schedule.every == every


@pytest.mark.parametrize("window", [2, 3, 5, 7])
@pytest.mark.parametrize("first", [0, 1])
def test_boundaries_that_hit_no_multiple_are_kept_all_the_same(window: int, first: int) -> None:
    """Accumulation: there is a boundary at the end of each window only."""
    boundaries = range(first + window, 300, window)
    schedule = SnapshotSchedule(4, start=first)
    kept = [step for step in boundaries if schedule.due(step)]
    assert all(b - a <= 4 + window for a, b in zip([first, *kept], kept, strict=False))
    assert len(train(SnapshotSchedule(None, start=first), boundaries, step_s=1, cost_s=1)) == 5


def test_a_boundary_that_the_disk_had_no_room_for_is_kept_though_no_snapshot_is_due(make: Make) -> None:
    worker = make(every=100)
    worker.train(3)
    assert worker.kept() == []
    worker.forward()  # the training thread goes on with the next step
    with worker.gate.hold(0.0) as problem:
        assert problem is None
        assert worker.snapshotter.keep(WAIT_S, whole=True)
    assert worker.kept() == [3]


# --- slots: a copied and sealed one is a finished checkpoint file, and a start finds only such ---


STAGES = ["wiped", "reserved", "copying", "copied", "headed", "committed"]
LAYOUT = {"model.weight": {"shape": [2000], "offsets": [0]}}


class KilledError(Exception):
    """Stands for a process that ends here; `tests/system/test_killed.py` does it for real."""


def state_of(step: int) -> dict[str, Any]:
    return {**STATE, "step": torch.full((300,), step)}


class Job:
    """One process after the other with the same arena."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "shm", folder / "ckpt"
        self._place[0].mkdir()
        self.arena = RankArena(*self._place, 0)

    def restart(self) -> list[str]:
        """A new process adopts the arena; what it has to say."""
        self.arena.close()
        self.arena = RankArena(*self._place, 0)
        return adopt_slots(self.arena)

    def copy(self, step: int, *, state: object = None, die_at: str = "", **options: Any) -> int | None:
        stages: list[str] = []

        def at(stage: str) -> None:
            stages.append(stage)
            if stage == die_at:
                raise KilledError(stage)

        snapshot = lay_out(state_of(step) if state is None else state, info_of(step), options.pop("layout", None))
        try:
            return copy_snapshot(self.arena, snapshot, self.arena.newest().sequence + 1, at=at, **options)
        finally:
            assert stages == [stage for stage in STAGES if stage in stages], "in the documented order"

    def take(self, step: int) -> int:
        index = self.copy(step)
        assert index is not None and seal_slot(self.arena, index)
        return index

    def path(self, index: int) -> Path:
        return self.arena.slots[index].path

    def steps(self) -> set[int]:
        """Steps of the slots that are sound checkpoint files."""
        found = set()
        for slot in self.arena.slots:
            if slot.path.exists():
                checkpoint = read_checkpoint(slot.path)
                assert_same(checkpoint.state, state_of(checkpoint.info.step))
                found.add(checkpoint.info.step)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.arena.close()


# --- the same bytes as on disk ---


@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_a_sealed_slot_is_the_file_that_a_save_writes(job: Job, tmp_path: Path, layout: dict[str, Any] | None) -> None:
    index = job.copy(3, layout=layout)
    assert index == 0 and job.arena.record(0).state is SlotState.COPIED
    with pytest.raises(CorruptCheckpointError, match="digest does not match"):
        read_checkpoint(job.path(0))
    assert seal_slot(job.arena, index)
    record = job.arena.record(0)
    assert (record.state, record.step, record.sequence) == (SlotState.SEALED, 3, 1)
    write_checkpoint(tmp_path / "saved.safetensors", state_of(3), info_of(3), layout=layout)
    assert job.path(0).read_bytes() == (tmp_path / "saved.safetensors").read_bytes()
    assert record.nbytes == job.path(0).stat().st_size


def test_a_slot_is_mapped_before_and_while_it_is_sealed(job: Job) -> None:
    index = job.copy(3)
    assert index is not None
    draft, file = job.path(index).read_bytes(), job.path(index)
    assert_same(map_checkpoint(file).state, state_of(3))
    assert seal_slot(job.arena, index)
    header = file.read_bytes()[: job.arena.record(index).header_bytes]
    for torn in range(0, len(header), 97):  # as far as a process has come that writes it at this moment
        file.write_bytes(header[:torn] + draft[torn:])
        assert_same(map_checkpoint(file).state, state_of(3))


# --- killed ---


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_killed_at_every_stage_of_a_copy(job: Job, stage: str, before: int) -> None:
    for step in range(1, before + 1):
        job.take(step)
    with pytest.raises(KilledError, match=stage):
        job.copy(9, die_at=stage)
    assert job.restart() == []
    other = {before} - {0}
    assert job.steps() == (other | {9} if stage == "committed" else other)
    job.take(10)
    job.take(11)
    assert job.steps() == {10, 11}


def test_a_seal_gives_way_and_can_be_done_later(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_HASH_PIECE", 100)
    index = job.copy(5)
    assert index is not None
    asked = iter([True] * 7 + [False])
    assert not seal_slot(job.arena, index, go_on=lambda: next(asked))
    assert list(asked) == [] and job.arena.record(index).state is SlotState.COPIED
    assert job.copy(6) == 1 - index
    job.restart()
    assert job.steps() == {5, 6}


# --- adopting ---


def cut(path: Path, record: SlotRecord) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path, record: SlotRecord) -> None:
    path.unlink()


def spoil_header(path: Path, record: SlotRecord) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 50 + data[58:])


def replace_header(path: Path, record: SlotRecord) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b'"text"'.ljust(record.header_bytes - 8) + data[record.header_bytes :])


@pytest.mark.parametrize("damage", [cut, remove, spoil_header, replace_header])
def test_a_damaged_slot_is_emptied_and_named(job: Job, damage: Callable[[Path, SlotRecord], None]) -> None:
    job.take(1)
    assert job.copy(2) == 1
    damage(job.path(1), job.arena.record(1))
    (note,) = job.restart()
    assert str(job.path(1)) in note and "is not used" in note
    assert job.arena.record(1) == SlotRecord() and not job.path(1).exists()
    assert job.steps() == {1}
    assert job.take(3) == 1 and job.steps() == {1, 3}


def test_a_slot_without_a_record_is_removed_however_good_it_looks(job: Job) -> None:
    job.take(1)
    job.arena.set_record(0, SlotRecord())
    assert job.restart() == [] and not job.path(0).exists()
