"""Which boundary a device holds that is behind the program. Stand-ins for CUDA's events: work is done when told so."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.device_progress import DeviceProgress, fills_queue, forward_fits_queue
from mindx_elastic.core.position import Position
from mindx_elastic.errors import UnsupportedStateError
from tests.capture.round_trip import assert_same, through_format


class Device:
    """Does what is queued on it in order; `done` says how much of it is done."""

    def __init__(self) -> None:
        self.queued = self.done = 0
        self.waited_for: list[int] = []
        self.is_capturing = False

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def Event(self, *, blocking: bool = False) -> Any:  # noqa: N802 - torch's name
        event = SimpleNamespace(place=-1)

        def record(stream: object) -> None:
            self.queued += 1
            event.place = self.queued

        def synchronize() -> None:
            self.waited_for.append(event.place)

        event.record, event.synchronize = record, synchronize
        event.query = lambda: self.done >= event.place
        return event

    def Stream(self, device: torch.device, priority: int = 0) -> Any:  # noqa: N802
        return SimpleNamespace(wait_event=lambda event: self.waited_for.append(event.place))

    def current_stream(self, device: torch.device) -> str:
        return "training"

    @contextmanager
    def stream(self, stream: object) -> Any:
        yield

    device = stream


class OnDevice(torch.Tensor):
    """Says that it is on a device."""

    is_cuda = True


@pytest.fixture
def device() -> Device:
    return Device()


def progress_of(device: Device) -> DeviceProgress:
    made = DeviceProgress(device)
    made.follow([torch.zeros(1).as_subclass(OnDevice)])
    made.keeps_older = True
    return made


@pytest.fixture
def progress(device: Device) -> DeviceProgress:
    return progress_of(device)


def pass_steps(progress: DeviceProgress, *steps: int) -> None:
    """Each an update and a boundary: places 2n and 2n + 1 of the device's queue, after the first boundary at 1."""
    for step in steps:
        if step:
            progress.begin_update()
        progress.at_boundary(step, f"kept {step}")


def landed(progress: DeviceProgress, *, has_updated: bool = False) -> int | None:
    found = progress.newest_held(lambda: False, has_updated=has_updated)
    assert found is None or found.kept == f"kept {found.step}"
    return None if found is None else found.step


@dataclass
class Passed:
    """What the oracle knows of a boundary: its step, its place in the queue, and that of the first update after it."""

    step: int
    place: int
    left_at: float = math.inf


@given(st.lists(st.sampled_from(["update", "boundary"]), max_size=14), st.data())
def test_the_newest_boundary_that_the_device_holds_is_known(actions: list[str], data: st.DataObject) -> None:
    """A boundary without an update since is the same one, copied once more. Four are kept."""
    device = Device()
    progress, passed, has_updated = progress_of(device), [Passed(0, 1)], False
    progress.at_boundary(0, "kept 0")
    for action in actions:
        if action == "update":
            progress.begin_update()
            if not has_updated:
                passed[-1].left_at = device.queued
        else:
            step = passed[-1].step + has_updated
            progress.at_boundary(step, f"kept {step}")
            passed[len(passed) - (not has_updated) :] = [Passed(step, device.queued)]
        has_updated = action == "update"
    device.done = data.draw(st.integers(0, device.queued))
    held = [
        boundary.step
        for boundary in passed[-4:]
        if boundary.place <= device.done
        and (boundary.left_at > device.done or (boundary is passed[-1] and not has_updated))
    ]
    assert landed(progress, has_updated=has_updated) == (held[-1] if held else None)
    assert progress.comes_here(0.0) is (passed[-1].place <= device.done)


def test_an_update_that_the_program_has_begun_is_waited_for(device: Device, progress: DeviceProgress) -> None:
    pass_steps(progress, 0, 1)
    progress.begin_update(is_long=True)
    assert device.waited_for == [4], "it may fill the queue"
    device.done = 3
    asked: list[bool] = []
    found = progress.newest_held(lambda: len(asked) < 3 and not asked.append(True), has_updated=True)  # type: ignore[func-returns-value]
    assert found is not None and found.step == 1 and len(asked) == 3, "it waits for the device to begin the update"
    device.done = 4
    # The update gate is clean: the mark was set, and the update waits for the reader that asks.
    assert landed(progress, has_updated=True) is None and landed(progress, has_updated=False) == 1


@pytest.mark.parametrize("in_forward", [False, True])
def test_the_program_waits_until_the_device_begins_the_update_before_last(
    device: Device, progress: DeviceProgress, in_forward: bool
) -> None:
    progress.waits_in_forward = in_forward
    for step in range(4):
        progress.end_forward()
        pass_steps(progress, step)
        progress.at_boundary(step, f"kept {step}")
        progress.end_step()
    assert sorted({*device.waited_for}) == ([3, 6] if in_forward else [3, 6, 9])


def test_which_forwards_and_updates_fit_the_queue() -> None:
    def fills(count: int, foreach: bool | None) -> bool:
        return fills_queue(torch.optim.AdamW([nn.Parameter(torch.zeros(1)) for _ in range(count)], foreach=foreach))

    assert fills(40, False) and not (fills(4, False) or fills(40, None) or fills_queue(None))

    def layers(count: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(count)))

    assert forward_fits_queue([]) and forward_fits_queue([layers(40)]) and forward_fits_queue([layers(30), layers(30)])
    assert not forward_fits_queue([layers(100)]) and not forward_fits_queue([layers(40), layers(40)])


def test_nothing_is_kept_and_waited_for_alone_or_without_a_device(device: Device) -> None:
    alone, without = DeviceProgress(device), DeviceProgress(device)
    without.follow([torch.zeros(1)])
    pass_steps(without, 0, 1)
    with without.reading():
        assert not without.is_used and without.comes_here(0.0) and without.newest is None
    assert device.queued == 0
    alone.follow([torch.zeros(1).as_subclass(OnDevice)])
    pass_steps(alone, 0, 1, 2, 3)
    alone.wait_for_update()
    assert device.waited_for == []
    device.done = 2
    assert landed(alone) is None
    alone.follow([torch.zeros(1).as_subclass(OnDevice)])
    assert alone.newest is None, "other parameters make older boundaries useless"


def test_a_reader_of_an_older_boundary_waits_for_that(device: Device, progress: DeviceProgress) -> None:
    pass_steps(progress, 0, 1, 2)
    with progress.reading():
        pass
    assert device.waited_for.pop() == 5, "the newest one"
    device.done = 3
    found = progress.newest_held(lambda: False, has_updated=False)
    assert found is not None and found.step == 1
    progress.hold(found)
    with progress.reading():
        pass
    assert device.waited_for == [3] and progress.has_gone_back
    assert progress.still_holds and landed(progress) == 1, "a second look gives the same"
    device.done = 4
    assert not progress.still_holds and landed(progress) is None
    pass_steps(progress, 3)
    assert not progress.has_gone_back and progress.still_holds


class Job:
    """A training on the CPU whose collector keeps older boundaries as if its weights were on a device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        targets = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.schedule}
        self.collector = Collector(targets)
        self.device = Device()
        self.collector.devices = DeviceProgress(self.device)
        self.collector.devices.follow([torch.zeros(1).as_subclass(OnDevice)])
        self.collector.keep_older_boundaries()

    def step(self, number: int) -> None:
        self.update()
        self.schedule.step()
        self.collector.copy(Position(number, 1, number, 10))

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.collector.devices.begin_update()
        self.optimizer.step()


def small(job: Job) -> Any:
    """What is in host memory, as it is now."""
    state = job.collector.state()
    return through_format(
        {
            "optimizer": [
                {key: one[key] for key in ("step", "count", "exp_avg")} for one in state["optimizer"]["state"].values()
            ],
            "groups": state["optimizer"]["param_groups"],
            "buffers": {name: value for name, value in state["model"].items() if "running" in name},
            **{name: state[name] for name in ("lr_scheduler", "rng", "progress")},
        }
    )


def test_going_back_gives_what_was_in_host_memory_then() -> None:
    """Also where an optimizer counts in Python numbers, or puts new tensors in the place of older ones."""
    job = Job()
    job.step(1)
    for own in job.optimizer.state.values():
        own["count"] = 7
    job.step(2)
    then, kept = small(job), job.collector.devices.newest
    assert kept is not None and then["progress"]["step"] == 2
    first = job.optimizer.state[next(job.model.parameters())]
    job.step(3)
    job.update()
    first["count"], first["exp_avg"] = 8, torch.zeros_like(first["exp_avg"])
    job.collector.go_back(kept)
    assert_same(small(job), then)
    assert job.collector.position.step == 2


def test_parameters_with_other_memory_are_refused() -> None:
    job = Job()
    job.step(1)
    kept = job.collector.devices.newest
    assert kept is not None
    weight = next(job.model.parameters())
    weight.data = weight.data.clone()
    with pytest.raises(UnsupportedStateError, match="have got other memory since the boundary"):
        job.collector.go_back(kept)


def test_much_on_the_device_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.collector.devices.keeps_older = False
    large = SimpleNamespace(is_cuda=True, nbytes=1 << 27)
    monkeypatch.setattr("mindx_elastic.capture.collector.tensors_in", lambda value: [("", large)])
    job.collector.keep_older_boundaries()
    assert not job.collector.devices.keeps_older
