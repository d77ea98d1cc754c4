"""What a boundary that is not looked at closely has of what changes between two close ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from mindx_elastic.capture.close_looks import is_close
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.core.position import Position
from mindx_elastic.errors import UnsupportedStateError

QUIET = 5  # the first step whose boundary is not a close one


class Job:
    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        self.optimizer = kind(self.module.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.collector = Collector({"model": self.module, "optimizer": self.optimizer})
        self.gate, self.steps = UpdateGate(), 0

    def forward(self) -> None:
        self.module(torch.tensor([[0.0, 1.0], [1.0, 3.0]])).square().sum().backward()

    def step(self, *, in_step: Callable[[], object] = lambda: None, is_left: bool = True) -> None:
        self.optimizer.zero_grad()
        self.forward()
        self.optimizer.step()
        in_step()
        self.steps += 1
        closely = is_close(self.steps, self.steps)
        self.gate.pass_boundary(self.collector.copy, Position(self.steps, 1, self.steps), closely, closely=closely)
        if is_left:
            self.collector.leave_boundary()
            self.gate.leave_boundary()

    def steps_to(self, number: int) -> None:
        while self.steps < number:
            self.step()

    def problem(self) -> str | None:
        with self.gate.hold(0.0) as problem:
            return problem


@pytest.fixture(params=[torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    torch.manual_seed(0)
    job = Job(request.param)
    job.gate.watch(job.collector.parameters, job.collector.optimizers())
    job.collector.on_new_parameters = job.gate.follow
    job.collector.watch()
    yield job
    job.collector.unwatch()
    job.gate.unwatch()


def test_the_first_four_and_two_of_fifty_are_close() -> None:
    assert [n for n in range(1, 120) if is_close(n, 1000 + n)] == [1, 2, 3, 4, 49, 50, 99, 100]


def test_a_step_without_an_update_is_read(job: Job) -> None:
    job.steps_to(QUIET)
    job.gate.pass_boundary(job.collector.copy, Position(6, 1, 6), False, closely=False)
    job.gate.leave_boundary()
    assert job.problem() is None and not job.gate.unguarded
    job.steps_to(12)
    assert job.problem() is None
    job.gate.leave_boundary()
    with torch.no_grad():
        job.module[0].get_parameter("weight").mul_(0.5)
    job.gate.pass_boundary(job.collector.copy, Position(13, 1, 13), False, closely=False)
    assert job.gate.unguarded, "no hook tells of an update by hand, so a copy must not go on beside it"


def test_weights_that_are_clipped_now_and_then_are_read_at_every_boundary_once_a_close_one_has_shown_it(
    job: Job,
) -> None:
    def clip() -> None:
        with torch.no_grad():
            job.module[0].get_parameter("weight").clamp_(-1, 1)

    job.steps_to(9)
    job.step(in_step=clip, is_left=False)
    assert job.problem() is None, "at the boundary itself they are read"
    job.step(in_step=clip)
    assert "1 parameters were changed" in str(job.problem()), "no save, rather than a wrong one"
    job.gate.lend()  # by the program that has gone on: nothing is read
    job.gate.give_back()
    assert job.problem()
    job.steps_to(50)
    for number in range(10):
        job.step(in_step=clip if number % 3 == 0 else lambda: None)
        assert job.problem() is None


def test_a_lent_boundary_has_counters_that_were_read(job: Job) -> None:
    job.steps_to(9)
    job.step(in_step=lambda: job.module[0].get_parameter("weight").data.add_(0), is_left=False)
    job.gate.lend()
    job.gate.leave_boundary()
    assert job.problem() is None
    job.gate.give_back()


@pytest.mark.parametrize("how", ["told", "untold", "other memory"])
def test_a_buffer_in_anothers_place(job: Job, how: str) -> None:
    norm = job.module[1]

    def replace() -> None:
        if how == "told":
            norm.running_mean = torch.full((2,), 7.0)
        elif how == "untold":
            norm._buffers["running_mean"] = torch.full((2,), 7.0)
        else:
            norm.get_buffer("running_mean").data = torch.full((2,), 7.0)

    job.steps_to(QUIET)
    job.step(in_step=replace)
    norm.get_buffer("running_mean").zero_()
    if how != "untold":
        assert job.collector.state()["model"]["1.running_mean"].tolist() == [7.0, 7.0]
    else:
        with pytest.raises(UnsupportedStateError, match=r"other tensors are in the place of buffers|`\.data = \.\.\.`"):
            job.collector.state()
    job.step(in_step=replace, is_left=False)
    assert job.collector.state()["model"]["1.running_mean"].tolist() == [7.0, 7.0], "at the boundary it is found"


def test_buffers_that_are_replaced_untold_are_looked_at_each_time_once_that_was_seen(job: Job) -> None:
    def replace() -> None:
        job.module[1]._buffers["running_mean"] = torch.full((2,), float(job.steps))

    while job.steps < 9:
        job.step(in_step=replace)
    job.module[1].get_buffer("running_mean").zero_()
    assert job.collector.state()["model"]["1.running_mean"].tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    "change", ["a part", "in an evaluation", "a part before the boundary", "the whole before the boundary"]
)
def test_flags_that_differ_from_those_of_the_last_look(job: Job, change: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mindx_elastic")
    job.steps_to(QUIET)
    if change.endswith("before the boundary"):
        job.step(in_step=(job.module[1] if change.startswith("a part") else job.module).eval)
    if change in ("in an evaluation", "a part before the boundary"):
        job.module.eval()
    if change == "a part":
        job.module[2].requires_grad_(False)
    extras = job.collector.state()["module_extras"]["model"]
    assert ("" in extras["eval"]) == (change == "the whole before the boundary")
    assert not extras["frozen"]
    assert ("has changed within the last 48 steps" in caplog.text) == (change != "the whole before the boundary")


@pytest.mark.parametrize("how", ["an evaluation in its block", "a save between two steps"])
def test_between_two_steps_flags_are_read(job: Job, how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mindx_elastic")
    job.steps_to(QUIET)
    job.step(in_step=job.module[1].eval)
    if how == "a save between two steps":
        job.collector.return_to_boundary()
        extras = job.collector.state()["module_extras"]["model"]
    else:
        with job.collector.kept_streams_and_flags():
            job.module.eval()
            extras = job.collector.state()["module_extras"]["model"]
    assert extras["eval"] == ["1"]
    assert not caplog.text


def test_a_removed_layer_is_found_at_the_next_close_boundary(job: Job) -> None:
    job.steps_to(QUIET)
    del job.module[2]
    job.steps_to(48)
    assert not job.collector.problems
    job.steps_to(49)
    assert "gone" in str(job.collector.problems)
