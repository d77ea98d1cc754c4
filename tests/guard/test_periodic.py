"""When periodic saves are due: by the clock on all ranks alike, and as often as one percent of the time allows."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.errors import UsageError
from mindx_elastic.guard import periodic
from mindx_elastic.guard.periodic import LEAST_S, SaveClock
from mindx_elastic.persist.format import read_header
from mindx_elastic.train import CheckpointConfig, ModelCheckpoint
from tests.fork_server import ForkedProcess, clean_environment
from tests.train.small_job import make_loader, make_model


class MemoryStore:
    """A c10d store in one process; a wait for an absent key fails at once unless `patient`."""

    def __init__(self, *, patient: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.reads = 0
        self._changed = threading.Condition()
        self._patient = patient

    def set(self, key: str, value: str, /) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        self.reads += 1
        return self.values[key].encode()

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: keys[0] in self.values, 10 if self._patient else 0):
                raise TimeoutError(f"{keys[0]} is not there")

    def delete_key(self, key: str, /) -> bool:
        return self.values.pop(key, None) is not None


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    speeds=st.lists(st.floats(0.001, 5), min_size=30, max_size=200),
    seconds=st.floats(0.5, 60),
    start=st.integers(0, 1000),
)
def test_all_ranks_save_the_same_steps(speeds: list[float], seconds: float, start: int) -> None:
    hand, store = HandClock(), MemoryStore()
    first = SaveClock(seconds, rank=0, store=store, now=hand)
    others = [SaveClock(seconds, rank=rank, store=store) for rank in (1, 2)]
    for step, speed in enumerate(speeds, start=start + 1):
        hand.now += speed
        wanted = first.due(step)
        assert [clock.due(step) for clock in others] == [wanted, wanted]


def test_checks_are_rare_and_saves_not_late() -> None:
    hand, store = HandClock(), MemoryStore()
    first, other = SaveClock(60, rank=0, store=store, now=hand), SaveClock(60, rank=1, store=store)
    saved = []
    for step in range(1, 60_001):
        hand.now += 0.01
        if first.due(step):
            saved.append(step)
        other.due(step)
    assert len(saved) in (9, 10)
    assert all(6000 <= b - a <= 6010 for a, b in zip([0, *saved], saved, strict=False))
    assert store.reads < 20 * len(saved)


def test_a_lost_store_ends_saving_by_time_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    clock = SaveClock(1, rank=1, store=MemoryStore())
    assert not any(clock.due(step) for step in range(1, 10))
    assert caplog.text.count("no longer saves by the clock") == 1


def test_ranks_at_different_steps_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    SaveClock(1, rank=0, store=store).due(5)
    assert not SaveClock(1, rank=1, store=store).due(6)
    assert "rank 0 looked at the clock at step 5, rank 1 at step 6" in caplog.text


def test_a_slower_rank_zero_is_waited_for() -> None:
    hand, store = HandClock(), MemoryStore(patient=True)
    first, other = SaveClock(1, rank=0, store=store, now=hand), SaveClock(1, rank=1, store=store)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(other.due(1)))
    thread.start()
    hand.now += 5
    assert first.due(1)
    thread.join(10)
    assert answers == [True]


_RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
from pathlib import Path
from mindx_elastic.config import RankInfo
from mindx_elastic.core.position import Position
from mindx_elastic.guard.periodic import PeriodicSave, SaveEvery
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=300), wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
policy = PeriodicSave("x", Path(), SaveEvery(seconds=1e-9))
policy.begin(RankInfo(rank=rank, world_size=2), print)
print("DUE", policy.due(Position(1)), policy._clock._broken, flush=True)
dist.barrier()
"""


def test_nodes_that_count_restarts_differently_meet(tmp_path: Path) -> None:
    """One node's agent has restarted its workers, the other one's has only met again: they count for themselves."""
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    ranks: list[ForkedProcess] = []
    port = 0
    try:
        for rank, restarts in enumerate(("0", "1")):
            env = {**clean_environment(), "TORCHELASTIC_RESTART_COUNT": restarts}
            command = [sys.executable, str(script), str(rank), str(port)]
            ranks.append(ForkedProcess(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            port = int(ranks[-1].stdout.readline())
        said = [process.stdout.read().strip() for process in ranks]  # the clock's own bound is 10 minutes
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()
    assert said == ["DUE True False"] * 2


# --- an interval that is measured ---


@given(cost_s=st.floats(0.0, 60.0), step_s=st.floats(0.01, 100.0), ranks=st.integers(1, 2))
def test_saves_cost_one_percent_at_most_and_come_as_often_as_that_allows(
    cost_s: float, step_s: float, ranks: int
) -> None:
    hand, store = HandClock(), MemoryStore()
    told: list[int] = []
    clock = SaveClock(None, told.append, store=store if ranks > 1 else None, now=hand)
    others = [SaveClock(None, rank=rank, store=store) for rank in range(1, ranks)]
    saved: list[float] = []
    for step in range(1, 2_000):
        hand.now += step_s
        due = clock.due(step)
        assert [other.due(step) for other in others] == [due] * len(others)
        if due:
            saved.append(hand.now)
            hand.now += cost_s
            clock.note_cost(cost_s)
    right = max(LEAST_S, 99 * cost_s, step_s)
    gaps = [b - a - cost_s for a, b in itertools.pairwise(saved[1:])]
    assert all(right * 0.999 - cost_s <= gap for gap in gaps)
    assert all(gap <= right + 10 * step_s for gap in gaps)
    assert not gaps or told[-1] == pytest.approx(max(LEAST_S, 99 * cost_s), rel=0.21, abs=1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_measures_its_saves(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(periodic, "LEAST_S", 0.02)
    config = CheckpointConfig(save_checkpoint_steps="auto", async_save=asynchronous, keep_checkpoint_max=100)
    callback = ModelCheckpoint(directory="out", config=config)
    told: list[int] = []
    begin = callback.policy.begin
    monkeypatch.setattr(callback.policy, "begin", lambda ranks, tell, **more: begin(ranks, told.append, **more))
    with caplog.at_level("INFO", logger="mindx_elastic"):
        make_model().train(40, make_loader(), callback)
    files = [read_header(path).info for path in Path("out").glob("*.safetensors")]
    assert any(info.step % 40 for info in files) and all(info.kind == "periodic" for info in files), files
    assert "a checkpoint every" in caplog.text and told, caplog.text


def test_auto_goes_before_seconds(caplog: pytest.LogCaptureFixture) -> None:
    config = CheckpointConfig(save_checkpoint_steps="auto", save_checkpoint_seconds=30)
    assert (config.adapts, config.steps, config.seconds) == (True, 0, 0.0)
    assert "save_checkpoint_seconds=30 is not used, because save_checkpoint_steps='auto' is given too" in caplog.text
    for wrong in ("Auto", "5", "", "never"):
        with pytest.raises(UsageError, match='give a number of steps or "auto"'):
            CheckpointConfig(save_checkpoint_steps=wrong)
