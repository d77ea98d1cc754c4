"""Which boundary a stop saves where the device is behind the program. Stand-ins for CUDA, see
``capture/test_device_progress.py``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindx_elastic.capture.update_gate import GateState
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.errors import SaveError
from mindx_elastic.guard.policy import ExitPolicy
from mindx_elastic.guard.saver import DeviceWentOnError, Saver
from mindx_elastic.guard.stop_save import choose_held_boundary
from mindx_elastic.persist.reader import read_checkpoint
from tests.capture.test_device_progress import Job


class Stop:
    """A job of three steps whose device has come to a place, and its saver."""

    def __init__(self, folder: Path, done: int) -> None:
        self.job = Job()
        for step in (1, 2, 3):
            self.job.step(step)
        self.job.device.done = done
        self.saver = Saver(self.job.collector, RankInfo(), EventLog(folder / "events.jsonl", run_id="run"))
        self.policy = ExitPolicy(
            kind="breakpoint",
            alarms=frozenset({"peer"}),
            name=lambda position: f"job-{position.step}.safetensors",
            directory=folder,
        )

    def choose(self, problem: str | None = None, state: GateState = GateState.CLEAN, **gate: bool) -> str | None:
        stands_for: Any = SimpleNamespace(state=state, unguarded=gate.get("unguarded", False))
        return choose_held_boundary(self.job.collector, problem, stands_for, lambda: False)

    @property
    def step(self) -> int:
        return self.job.collector.position.step

    def save(self) -> int:
        return self.saver.save_dying([self.policy], "a death").info.step


# Places in the queue of the device: 1 boundary 1, 2 update 2, 3 boundary 2, 4 update 3, 5 boundary 3. The first update
# has no mark, for there is no boundary in front of it.


@pytest.mark.parametrize(("done", "step"), [(5, 3), (3, 2), (1, 1)])
def test_the_newest_that_the_device_holds_is_saved(tmp_path: Path, done: int, step: int) -> None:
    stop = Stop(tmp_path, done)
    assert stop.choose() is None and stop.step == step
    assert stop.save() == step
    (path,) = tmp_path.glob("*.safetensors")
    state = read_checkpoint(path).state
    assert state["progress"]["step"] == step
    assert float(state["optimizer"]["state"][0]["step"]) == step


@pytest.mark.parametrize(
    ("done", "gate", "problem"),
    [
        (4, {"state": GateState.UPDATING}, "it was updating"),  # in the middle of an update there is none
        (3, {"unguarded": True}, "2 parameters were changed in place"),  # updates by hand are not taken back
    ],
)
def test_where_the_device_holds_none_it_is_said_why(tmp_path: Path, done: int, gate: Any, problem: str) -> None:
    stop = Stop(tmp_path, done)
    assert "has not come to the end of step 3" in str(stop.choose(unguarded=done == 3))
    assert stop.choose(problem, **gate) == problem


def test_an_update_that_has_not_reached_the_device_is_no_problem(tmp_path: Path) -> None:
    stop = Stop(tmp_path, 5)
    stop.job.update()
    assert stop.choose("an optimizer had stepped", GateState.DIRTY) is None and stop.step == 3
    assert stop.save() == 3


def test_a_device_that_goes_on_while_it_is_read_spoils_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was slow, not stuck. The newer boundary, which it then holds, is saved."""
    stop = Stop(tmp_path, 3)
    assert stop.choose() is None and stop.step == 2
    stop.job.device.done = 5
    with pytest.raises(SaveError, match="has gone on from step 2 while it was read") as caught:
        stop.save()
    assert isinstance(caught.value.__cause__, DeviceWentOnError)
    assert not list(tmp_path.glob("*.safetensors"))
    assert stop.choose() is None and stop.step == 3
    assert stop.save() == 3


def test_a_job_of_one_rank_waits_for_its_device(tmp_path: Path) -> None:
    stop = Stop(tmp_path, 3)
    stop.job.collector.devices.keeps_older = False
    stop.job.step(4)
    assert stop.choose() is None and stop.step == 4


def test_a_device_that_has_failed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(tmp_path, 3)

    def fail(*_: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    newest = stop.job.collector.devices.newest
    assert newest is not None
    newest.events[0].query = fail
    assert stop.choose() == "the device has failed (CUDA error: an illegal memory access)"


def test_nothing_of_it_concerns_a_job_without_a_device(tmp_path: Path) -> None:
    stop = Stop(tmp_path, 3)
    stop.job.collector.devices.follow([torch.zeros(1)])
    assert stop.choose() is None and stop.choose("why not") == "why not"
