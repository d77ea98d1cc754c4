"""Replays of CUDA graphs. A stand-in for one writes into the same memory through tensors with counters of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.graph_replays import GraphReplays
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.core.position import Position


class Graph:
    """Of `work`, which is not seen by torch's hooks and counters."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(tensor.detach().numpy())


class Job:
    def __init__(self) -> None:
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.model = nn.Sequential(self.linear, self.norm)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()
        self.collector = Collector({"model": self.model, "optimizer": self.optimizer})
        self.gate = UpdateGate()
        self.gate.watch(self.collector.parameters, self.collector.optimizers())
        self.buffer = self.norm.get_buffer("running_mean")
        self.weight, self.mean = same_memory(self.linear.weight), same_memory(self.buffer)
        self.momentum = same_memory(self.optimizer.state[self.linear.weight]["momentum_buffer"])

    @property
    def state(self) -> GateState:
        return self.gate.state

    def end_step(self) -> None:
        self.gate.pass_boundary(self.collector.copy, Position())


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    replays = GraphReplays(job.collector, job.gate, Graph)
    original = Graph.replay
    replays.watch()
    yield job
    replays.unwatch()
    job.gate.unwatch()
    assert Graph.replay is original


def test_a_graph_that_changes_weights_is_an_update(job: Job) -> None:
    graph = Graph(lambda: job.weight.mul_(0.5))
    for _ in range(5):
        assert job.gate.window_open()
        graph.replay()
        assert job.state.name == "DIRTY" and not job.gate.window_open()
        job.end_step()
        assert job.state.name == "CLEAN"
        with job.gate.hold(0.0) as problem:
            assert problem is None


def test_weights_that_begin_to_change_later_are_seen_at_a_power_of_two(job: Job) -> None:
    rates = iter([0.0] * 5 + [0.1] * 5)  # a warm-up that begins at 0
    graph = Graph(lambda: job.weight.mul_(1.0 - next(rates)))
    states = []
    for _ in range(10):
        graph.replay()
        states.append(job.state)
        job.end_step()
    assert states == [GateState.CLEAN] * 7 + [GateState.DIRTY] * 3


def test_what_it_does_not_change_may_still_be_in_a_backward(job: Job) -> None:
    """A generator whose loss comes from behind the graph of its critic."""
    other = nn.Linear(3, 3)
    collector = Collector({"model": job.model, "other": other, "optimizer": job.optimizer})
    replays = GraphReplays(collector, job.gate, Graph)
    replays.watch()
    loss = other(torch.randn(2, 3, requires_grad=True)).sum()
    Graph(lambda: job.weight.mul_(0.5)).replay()
    loss.backward()
    replays.unwatch()


def test_what_fails_in_a_look_leaves_the_gate_as_it_was(job: Job) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Graph(fail).replay()
    assert job.state is GateState.CLEAN
    with job.gate.hold(0.0) as problem:
        assert problem is None


def test_two_guards_need_not_be_left_in_turn() -> None:
    jobs = [Job(), Job()]
    original, graph = Graph.replay, Graph(lambda: [job.weight.mul_(0.5) for job in jobs])
    watching = [GraphReplays(job.collector, job.gate, Graph) for job in jobs]
    for each in watching:
        each.watch()
    graph.replay()
    assert [job.state for job in jobs] == [GateState.DIRTY] * 2
    for job in jobs:
        job.end_step()
    watching[0].unwatch()
    graph.replay()
    assert [job.state for job in jobs] == [GateState.CLEAN, GateState.DIRTY]
    watching[1].unwatch()
    jobs[1].end_step()
    graph.replay()
    assert jobs[1].state is GateState.CLEAN and Graph.replay is not original  # it calls the original one alone
    Graph.replay = original  # type: ignore[method-assign]
    for job in jobs:
        job.gate.unwatch()
