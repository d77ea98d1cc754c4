"""What a worker keeps in memory: opened where it can be, handed on, and gone after a clean end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import MemorySettings, RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.guard.saver import Saver
from mindx_elastic.memory import memory as memory_module
from mindx_elastic.memory.folders import job_folder
from mindx_elastic.memory.memory import Memory, open_memory
from mindx_elastic.persist.format import read_header
from tests.guarded import Job, no_traces, plain_environment


class Place:
    def __init__(self, folder: Path) -> None:
        self.base, self.directory = folder / "shm", folder / "ckpt"
        self.base.mkdir()
        self.directory.mkdir()
        self.job = job_folder(self.base, self.directory)

    def open(self, every: int | None = 1) -> Memory | None:
        settings = MemorySettings(base=self.base, snapshot_every=every)
        return open_memory(settings, self.directory, RankInfo(), replicated=False)

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.job)) for path in self.job.rglob("*") if not path.is_dir())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Training:
    """Boundaries of a small network into a memory."""

    def __init__(self, place: Place, memory: Memory) -> None:
        self.memory = memory
        network = nn.Linear(2, 2)
        self.collector = Collector({"model": network})
        self.gate = UpdateGate()
        events = EventLog(place.directory / "events.jsonl")
        events.run_id = "run-a"
        saver = Saver(self.collector, RankInfo(), events)
        memory.start(
            self.collector,
            self.gate,
            Exchange(),
            events,
            replicas=[],
            next_step=lambda: 1,
            describe=lambda: saver.describe("snapshot"),
        )

    def reach(self, step: int) -> None:
        self.gate.pass_boundary(lambda: self.collector.copy(Position(step, 1, step, 10)))
        self.memory.at_boundary(step)


def steps(place: Place) -> set[int]:
    return {read_header(path).info.step for path in place.job.rglob("slot_*")}


def test_nothing_is_opened_where_nothing_is_to_be_kept(place: Place) -> None:
    assert place.open(0) is None
    assert (
        open_memory(MemorySettings(base=None, snapshot_every=1), place.directory, RankInfo(), replicated=True) is None
    )
    assert list(place.base.iterdir()) == []


def test_what_an_earlier_run_has_left_is_taken_over_even_without_snapshots_now(place: Place) -> None:
    memory = place.open(1)
    assert memory is not None
    training = Training(place, memory)
    for step in (1, 2, 3):
        training.reach(step)
    memory.close(keep=True)
    assert place.left() == [
        *("owner.json", "rank_0/commit", "rank_0/lock", "rank_0/slot_0.safetensors", "rank_0/slot_1.safetensors")
    ]
    again = place.open(0)
    assert again is not None and steps(place) == {2, 3}
    again.close(keep=False)
    assert list(place.base.iterdir()) == []


@pytest.mark.parametrize("trouble", ["in use", "wide"])
def test_trouble_is_said_and_the_training_goes_on_without(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    if trouble == "in use":

        def refuse(*args: object) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr("fcntl.lockf", refuse)
        monkeypatch.setattr("mindx_elastic.memory.arena._PREDECESSOR_S", 0.0)
    else:
        place.job.parent.mkdir(mode=0o700)
        place.job.mkdir(mode=0o755)
    assert place.open() is None
    assert "nothing is kept in memory, checkpoints on disk are not affected" in caplog.text


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


def _locks_held() -> list[str]:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return [path for link in links if link.is_symlink() and (path := os.readlink(link)).endswith("/lock")]


def test_a_start_that_fails_leaves_no_arena_locked(
    tmp_path: Path, memory_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is lost between opening memory and the first meeting."""
    fired = []
    real = Exchange.gather

    def lost(self: Exchange, name: str, value: Any, merge: Any, **more: Any) -> Any:
        if name != "here":
            return real(self, name, value, merge, **more)
        fired.append(_locks_held())
        raise ConnectionError("injected: the store is gone")

    monkeypatch.setattr(Exchange, "gather", lost)
    with pytest.raises(ConnectionError, match="injected"):
        Job(tmp_path / "ckpt", snapshot_every=1).run()
    assert len(fired) == 1 and len(fired[0]) == 1, "the arena was open"
    assert _locks_held() == []
    assert list(memory_base.iterdir()) == [], "an arena with nothing in it is removed"


def test_memory_that_cannot_be_adopted_is_not_left_locked(
    tmp_path: Path, memory_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arena: Any) -> Any:
        raise OSError("injected")

    monkeypatch.setattr(memory_module, "adopt_slots", fail)
    Job(tmp_path / "ckpt", snapshot_every=1).run(epochs=1)
    assert _locks_held() == []
    assert list(memory_base.iterdir()) == [], "an arena with nothing in it is removed"
