"""What a worker keeps in memory: opened where it can be, handed on, and gone after a clean end."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import MemorySettings, RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.memory import memory as memory_module
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, read_ring
from mindx_elastic.memory.memory import Memory, open_memory
from mindx_elastic.persist.reader import read_checkpoint
from tests.checkpoint_files import info_of
from tests.guarded import Job, no_traces, plain_environment
from tests.start.arenas import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def open_on(machine: Machine, every: int) -> Memory | None:
    settings = MemorySettings(base=machine.base, snapshot_every=every)
    return open_memory(settings, machine.directory, RankInfo(), replicated=False)


def test_what_an_earlier_run_has_left_is_taken_over_even_without_snapshots_now(machine: Machine) -> None:
    machine.snapshot(2)
    machine.snapshot(3, sealed=False)
    for keep in (True, False):
        memory = open_on(machine, 0)
        assert memory is not None
        assert [read_checkpoint(path).info.step for path in machine.slots(0)] == [2, 3]
        memory.close(keep=keep)
    assert list(machine.base.iterdir()) == []


@pytest.mark.parametrize("trouble", ["in use", "wide"])
def test_trouble_is_said_and_the_training_goes_on_without(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    if trouble == "in use":

        def refuse(*args: object) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr("fcntl.lockf", refuse)
        monkeypatch.setattr("mindx_elastic.memory.arena._PREDECESSOR_S", 0.0)
    else:
        machine.job.parent.mkdir(mode=0o700)
        machine.job.mkdir(mode=0o755)
    assert open_on(machine, 1) is None
    assert "nothing is kept in memory, checkpoints on disk are not affected" in caplog.text


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_boundary_that_a_rank_has_resumed_from_is_in_memory_before_the_next_one(
    machine: Machine, is_resumed: bool
) -> None:
    """And another machine's first rank makes the snapshots: this one pins what is its own."""
    settings = MemorySettings(base=machine.base, snapshot_every=2)
    memory = open_memory(settings, machine.directory, RankInfo(local_rank=1), replicated=True)
    assert memory is not None
    model = torch.nn.Linear(2, 2)
    collector = Collector({"model": model})
    collector.copy(Position(step=5, epoch=1, step_in_epoch=5))
    memory.start(
        collector,
        UpdateGate(),
        Exchange(),
        EventLog(machine.directory / "events.jsonl", run_id="run-a"),
        replicas=[model],
        counter=SimpleNamespace(step=5),
        describe=lambda: info_of(5),
        resumed=info_of(5) if is_resumed else None,
    )

    def steps() -> list[int]:
        return [record.step for ring in machine.job.rglob(BOUNDARIES_FILE) for record in read_ring(ring)]

    assert steps() == [5] * is_resumed
    for step in (6, 7):
        collector.copy(Position(step=step, epoch=1, step_in_epoch=step))
        memory.at_boundary(step)
        assert steps().count(step) == 1 + (step == 6), "where a snapshot is due it is there for longer, too"
    assert memory._snapshotter is not None and memory._snapshotter.take_last()
    assert steps().count(7) == 2
    memory.close(keep=False)


# --- a whole guard ---


@pytest.fixture
def memory_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    plain_environment(monkeypatch)
    base = tmp_path / "shm"
    base.mkdir()
    monkeypatch.setenv("MINDX_ARENA_DIR", str(base))
    with ExitStack() as stack:
        stack.enter_context(no_traces())
        yield base


@pytest.mark.parametrize("every", [3, "auto"])
def test_a_finished_guard_leaves_nothing(tmp_path: Path, memory_base: Path, every: int | str) -> None:
    job = Job(tmp_path / "ckpt", snapshot_every=every)
    inside: list[int] = []
    weights = job.run(after=lambda job, step: inside.append(len(list(memory_base.iterdir()))))
    assert set(inside) == {1} and list(memory_base.iterdir()) == []
    plain = Job(tmp_path / "plain").run()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


@pytest.mark.parametrize("every", [1, 2])
def test_a_guard_that_could_not_save_is_resumed_from_memory(tmp_path: Path, memory_base: Path, every: int) -> None:
    """An error half-way through an update: no boundary is there to be saved."""
    plain = Job(tmp_path / "plain").run()

    class BrokenError(Exception):
        pass

    def breaks(*args: object, **kwargs: object) -> None:
        raise BrokenError

    def middle(job: Job, step: int) -> None:
        if step == 8:
            job.optimizer.register_step_post_hook(breaks)

    job = Job(tmp_path / "ckpt", snapshot_every=every)
    with pytest.raises(BrokenError):
        job.run(middle=middle)
    assert list((tmp_path / "ckpt").glob("*.safetensors")) == []
    again = Job(tmp_path / "ckpt", seed=5, snapshot_every=every)
    weights = again.run()
    assert again.guard.resumed_from_step == (7 if every == 1 else 6)
    assert again.guard.resumed_path is not None and again.guard.resumed_path.is_relative_to(memory_base)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert list(memory_base.iterdir()) == []


def test_a_run_that_no_log_names_is_told_what_that_would_cost(
    tmp_path: Path, memory_base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: EventLog, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(EventLog, "_append", refuse)
    Job(tmp_path / "ckpt", snapshot_every=1).run(epochs=1)
    assert "a start does not use what it has kept in memory" in caplog.text


def _locks_held() -> list[str]:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return [path for link in links if link.is_symlink() and (path := os.readlink(link)).endswith("/lock")]


@pytest.mark.parametrize("trouble", ["the store is lost", "nothing can be adopted"])
def test_a_start_that_fails_leaves_no_arena_locked(
    tmp_path: Path, memory_base: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """`trouble`: between opening memory and the first meeting, or while it is opened."""
    held: list[list[str]] = []
    real = Exchange.gather

    def lost(self: Exchange, name: str, value: Any, merge: Any, **more: Any) -> Any:
        if name != "here":
            return real(self, name, value, merge, **more)
        held.append(_locks_held())
        raise ConnectionError("injected")

    def fail(arena: Any) -> Any:
        raise OSError("injected")

    job = Job(tmp_path / "ckpt", snapshot_every=1)
    if trouble == "the store is lost":
        monkeypatch.setattr(Exchange, "gather", lost)
        with pytest.raises(ConnectionError, match="injected"):
            job.run()
        assert [len(locks) for locks in held] == [1], "the arena was open"
    else:
        monkeypatch.setattr(memory_module, "adopt_slots", fail)
        job.run(epochs=1)
    assert _locks_held() == []
    assert list(memory_base.iterdir()) == [], "an arena with nothing in it is removed"
