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


def test_an_optimizer_inside_backward_is_seen(gate: UpdateGate, layer: nn.Linear) -> None:
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {
        p: torch.optim.SGD([p], lr=0.1) for p in layer.parameters()
    }
    states: list[GateState] = []

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        states.append(gate.state)

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    backward(layer)
    assert states == [GateState.DIRTY] * 2
    assert problem(gate)
    gate.pass_boundary(lambda: None)
    assert problem(gate) is None


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


def test_whoever_asks_while_the_boundary_is_copied_waits_with_a_bound(gate: UpdateGate) -> None:
    seen: list[str | None] = []
    gate.pass_boundary(lambda: start(lambda: seen.append(problem(gate))).join(WAIT_S))
    assert seen == ["the boundary was being copied, or its copy failed"]
    assert problem(gate) is None


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


class _Replacing(torch.optim.SGD):
    """Its steps make new tensors, as one that keeps its state elsewhere between them."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for entry in self.state.values():
            entry["momentum_buffer"] = entry["momentum_buffer"].clone()
        return result


@pytest.mark.parametrize("kind", [torch.optim.SGD, _Replacing])
def test_optimizer_state_that_is_changed_by_hand_is_no_state_of_the_boundary(kind: type[torch.optim.SGD]) -> None:
    """A program that decays or clears the momentum at the head of a step."""
    layer = torch.nn.Linear(2, 2)
    optimizer = kind(layer.parameters(), lr=0.1, momentum=0.9)
    gate = UpdateGate()
    gate.watch(list(layer.parameters()), [optimizer])
    try:
        for change in ("mul", "clear", "replace", ""):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            gate.pass_boundary(lambda: None)
            with gate.hold(0.0) as problem:
                assert problem is None
            if change == "mul":
                optimizer.state[layer.bias]["momentum_buffer"].mul_(0.9)
            elif change == "clear":
                optimizer.state.clear()
            elif change == "replace":
                optimizer.state[layer.weight] = {"momentum_buffer": torch.zeros(2, 2)}
            with gate.hold(0.0) as problem:
                assert ("optimizers' state" in str(problem)) == bool(change)
    finally:
        gate.unwatch()


@pytest.mark.parametrize("change", ["a layer is left out", "a layer is frozen", "no update", "decayed"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_the_program_does_to_state_before_a_boundary_belongs_to_it(kind: Any, change: str) -> None:
    network = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    optimizer = kind(network.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    gate = UpdateGate()
    gate.watch(list(network.parameters()), [optimizer])

    def decay() -> None:
        for value in optimizer.state[network[2].bias].values():
            value.mul_(0.5)

    try:
        for step in range(16):
            now = change if step == 9 else ""
            network[1].requires_grad_(change != "a layer is frozen" or step < 9)
            optimizer.zero_grad()
            layers = [network[0], network[2]] if now == "a layer is left out" else network
            torch.nn.Sequential(*layers)(torch.ones(1, 2)).sum().backward()
            if now != "no update":
                optimizer.step()
            if now == "decayed":
                decay()
            gate.pass_boundary(lambda: None)
            with gate.hold(0.0) as problem:
                assert problem is None, f"step {step}"
        decay()
        with gate.hold(0.0) as problem:
            assert "optimizers' state" in str(problem)
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


def test_states_of_all_parameters_are_looked_at_in_some_steps_and_once_one_was_changed_by_hand_in_all() -> None:
    """A program that clears the momentum of dead neurons, in one layer."""
    network = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    gate = UpdateGate()
    gate.watch(list(network.parameters()), [optimizer])

    def step() -> None:
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        gate.pass_boundary(lambda: None)

    try:
        step()
        step()
        assert gate.changed_since_boundary() is None
        optimizer.state[network[1].get_parameter("weight")]["exp_avg"].mul_(0.5)
        with gate.hold(0.0) as problem:
            assert "1 values of the optimizers' state" in str(problem)
        step()
        assert gate.changed_since_boundary() is None
        optimizer.state[network[1].get_parameter("bias")]["exp_avg"] = torch.zeros(2)
        with gate.hold(0.0) as problem:
            assert "optimizers' state" in str(problem)
    finally:
        gate.unwatch()
