"""The update gate: what counts as the last boundary, and who waits for whom."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mindx_elastic.capture.update_gate import GateState, UpdateGate
from tests.harness import wait_until

WAIT_S = 120.0


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 3)


@pytest.fixture
def gate(layer: nn.Linear) -> Iterator[UpdateGate]:
    gate = UpdateGate()
    gate.watch(list(layer.parameters()))
    yield gate
    gate.unwatch()


def backward(layer: nn.Module) -> None:
    layer(torch.ones(2, 3)).sum().backward()


def problem(gate: UpdateGate) -> str | None:
    with gate.hold(0.0) as found:
        return found


def updated(layer: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has stepped once."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    backward(layer)
    optimizer.step()
    return optimizer


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_an_optimizer_is_seen_where_it_is_named_or_changes_what_is_kept(gate: UpdateGate) -> None:
    other = nn.Linear(3, 1)
    probe = updated(other)
    assert problem(gate) is None
    gate.named = {id(probe)}
    probe.step()
    assert gate.state is GateState.DIRTY
    gate.named = set()
    gate.pass_boundary(lambda: None)
    probe.add_param_group({"params": list(gate._parameters)})
    probe.step()
    assert gate.state is GateState.DIRTY


def test_updates_of_two_threads_overlap(gate: UpdateGate) -> None:
    """Autograd runs hooks of several devices in several threads."""
    gate.begin_update()
    gate.begin_update()
    gate.end_update()
    assert problem(gate) == "an optimizer.step() was in progress or failed half-way"
    gate.end_update()
    assert "an optimizer had stepped and the boundary was not reached" in str(problem(gate))


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise RuntimeError("injected")


def test_a_failed_update_is_torn_and_the_boundary_after_it_says_so(gate: UpdateGate, layer: nn.Linear) -> None:
    backward(layer)
    with pytest.raises(RuntimeError, match="injected"):
        Failing(layer.parameters(), lr=0.1).step()
    assert problem(gate) == "an optimizer.step() was in progress or failed half-way"
    assert not gate.pass_boundary(lambda: None), "the program has swallowed it: the caller must be told"
    assert problem(gate) is None
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert gate.pass_boundary(lambda: None), "told once"


def test_gradients_without_an_update_are_an_open_window(gate: UpdateGate, layer: nn.Linear) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert not gate.window_open(), "no gradients at all"
    backward(layer)
    assert gate.window_open()
    optimizer.step()
    assert not gate.window_open(), "the update has come"
    gate.pass_boundary(lambda: None)
    optimizer.zero_grad()
    assert not gate.window_open()
    backward(layer)
    with torch.no_grad():
        layer.weight -= 0.1
    assert not gate.window_open(), "updated by hand"


def test_an_exception_in_the_copy_leaves_the_gate_usable_and_not_clean(gate: UpdateGate, layer: nn.Linear) -> None:
    updated(layer)

    def fail() -> None:
        raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        gate.pass_boundary(fail)
    assert problem(gate) == "the boundary was being copied, or its copy failed"
    assert gate.pass_boundary(lambda: None)
    with pytest.raises(ValueError, match="injected"), gate.hold(0.0):
        fail()
    assert problem(gate) is None


def test_hold_waits_for_the_boundary(gate: UpdateGate, layer: nn.Linear) -> None:
    updated(layer)
    order: list[str] = []

    def capture() -> None:
        with gate.hold(WAIT_S) as found:
            order.append(f"captured: {found}")

    thread = start(capture)
    while not gate._waiters:
        assert thread.is_alive()
    gate.pass_boundary(lambda: order.append("boundary"))
    thread.join(WAIT_S)
    assert order == ["boundary", "captured: None"]


def test_a_dying_save_gets_in_beside_a_copy_and_before_a_writer_that_waits_for_it(
    gate: UpdateGate, layer: nn.Linear
) -> None:
    backward(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    gate.lend()
    stepping = start(optimizer.step)
    wait_until(lambda: gate._writers == 1, "the update waits for the copy", WAIT_S)
    before = layer.weight.clone()
    for _ in range(3):
        with gate.hold(0.0) as found:
            assert found is None and gate.state is GateState.CLEAN
            assert torch.equal(layer.weight, before)
    with gate.hold(0.0):
        start(gate.give_back).join(WAIT_S)  # any thread
        stepping.join(0.05)  # not for ordering: the longer, the surer
        assert stepping.is_alive() and torch.equal(layer.weight, before), "the copy is done, the save is not"
    stepping.join(WAIT_S)
    assert gate.state is GateState.DIRTY and not torch.equal(layer.weight, before)


def test_the_boundary_waits_for_readers_too(gate: UpdateGate) -> None:
    copied: list[int] = []
    gate.lend()
    passing = start(lambda: gate.pass_boundary(lambda: copied.append(1)))
    wait_until(lambda: gate._writers == 1, "the boundary waits for the copy", WAIT_S)
    assert problem(gate) is None and copied == []
    gate.give_back()
    passing.join(WAIT_S)
    assert copied == [1]


def test_a_forked_child_waits_for_no_reader_of_its_parent(gate: UpdateGate, layer: nn.Linear) -> None:
    backward(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    gate.lend()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        optimizer.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gate.give_back()
    optimizer.step()
    assert gate.state is GateState.DIRTY, "the parent's hooks are still there"


class Replacing(torch.optim.SGD):
    """Its steps make new tensors, as one that keeps its state elsewhere between them."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for entry in self.state.values():
            entry["momentum_buffer"] = entry["momentum_buffer"].clone()
        return result


class Program:
    """What programs do in a step in front of its boundary, or behind it. Each says whether it has changed something."""

    def __init__(self, kind: Any) -> None:
        self.network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        options = {} if kind is torch.optim.AdamW else {"momentum": 0.9}
        self.optimizer: torch.optim.Optimizer = kind(self.network.parameters(), lr=0.1, **options)
        self.other = torch.optim.SGD(self.network[0].parameters(), lr=0.1)
        self.weight = self.network[1].get_parameter("weight")

    def train(self) -> bool:
        self.optimizer.zero_grad()
        self.network(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        return True

    def train_in_part(self) -> bool:
        self.optimizer.zero_grad()
        nn.Sequential(self.network[0], self.network[2])(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        return True

    def train_otherwise(self) -> bool:
        self.network[0](torch.ones(1, 2)).sum().backward()
        self.other.step()
        return True

    @torch.no_grad()
    def change_weight(self) -> bool:
        self.weight.mul_(0.5)
        return True

    def decay(self) -> bool:
        for value in self.optimizer.state.get(self.weight, {}).values():
            value.mul_(0.5)
        return self.weight in self.optimizer.state

    def replace(self) -> bool:
        for state in self.optimizer.state.values():
            state.update({name: value.clone() for name, value in state.items()})
        return bool(self.optimizer.state)

    def clear(self) -> bool:
        had_state = bool(self.optimizer.state)
        self.optimizer.state.clear()
        return had_state


UPDATES = ["train", "train_in_part", "train_otherwise"]
BY_HAND = ["change_weight", "decay", "replace", "clear"]


@settings(deadline=None)
@given(
    st.sampled_from([torch.optim.SGD, torch.optim.AdamW, Replacing]),
    st.lists(st.sampled_from(["train", "train", *UPDATES, *BY_HAND]), min_size=1, max_size=20),
    st.sampled_from([*BY_HAND, ""]),
    st.booleans(),
)
def test_what_has_changed_since_the_boundary_is_seen(kind: Any, steps: list[str], after: str, closely: bool) -> None:
    """And what the program does in front of it belongs to it, for certain where boundaries are looked at closely, and
    of each one as long as the program has not gone on."""
    program, gate = Program(kind), UpdateGate()
    gate.watch(list(program.network.parameters()), [program.optimizer, program.other])
    try:
        for name in steps:
            getattr(program, name)()
            gate.pass_boundary(lambda: None, closely=closely)
            if closely:
                gate.leave_boundary()
                assert problem(gate) is None, name
        assert problem(gate) is None, "the program is there still"
        gate.leave_boundary()
        has_changed = bool(after) and getattr(program, after)()
        assert (problem(gate) is not None) == has_changed
        torch.optim.SGD(program.network.parameters(), lr=0.1).step()
        gate.pass_boundary(lambda: None)
        assert problem(gate) is None
    finally:
        gate.unwatch()


@pytest.mark.parametrize("change", ["a new group", "frozen"])
def test_a_change_between_close_looks(change: str) -> None:
    """What is trained from now on shows in the optimizer's state; what is no longer trained is not known, and said."""
    network = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    late = network[0].requires_grad_(change == "frozen")
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.1)
    gate = UpdateGate()
    gate.watch(list(network.parameters()), [optimizer])
    try:
        for step in range(8):
            if step == 6:
                late.requires_grad_(change != "frozen")
                if change == "a new group":
                    optimizer.add_param_group({"params": late.parameters()})
            optimizer.zero_grad()
            network(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            gate.pass_boundary(lambda: None, closely=step < 4)
        problem = gate.changed_since_boundary()
        assert problem is None if change == "a new group" else "or updated otherwise than" in str(problem)
    finally:
        gate.unwatch()
