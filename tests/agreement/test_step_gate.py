"""The step gate between a training thread and a watcher."""

from __future__ import annotations

import threading

from mindx_elastic.agreement.step_gate import StepGate


def test_an_open_gate_lets_every_step_pass() -> None:
    gate = StepGate()
    assert not any(gate.arrive(step) for step in range(1, 100))
    assert gate.step == 99


def test_a_closed_gate_offers_the_coming_boundary_and_holds_the_rank_there() -> None:
    gate = StepGate()
    gate.arrive(4)
    assert gate.close() == 5
    assert gate.arrive(5)
    gate.open_until(7)
    assert gate.wait(10) is False  # another rank is ahead: go on
    assert not gate.arrive(6)
    assert gate.arrive(7)
    assert gate.wait(10) is True


def test_between_two_steps_the_boundary_at_hand_is_offered() -> None:
    gate = StepGate()
    gate.arrive(4)
    gate.leave_step()
    assert gate.close() == 4
    assert gate.at_limit() and gate.is_between
    assert gate.enter_step(), "the rank must not start a step past its offer"
    assert not gate.is_between


def test_a_step_begun_in_time_is_finished() -> None:
    gate = StepGate()
    gate.arrive(4)
    gate.leave_step()
    assert gate.enter_step() is False
    assert gate.close() == 5


def test_waiting_ends_with_the_decision_or_the_bound() -> None:
    gate = StepGate()
    gate.close()
    assert gate.wait(0.01) is True  # no decision in time: stopping at a boundary is always safe
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(gate.wait(30)))
    thread.start()
    gate.open_until(5)
    thread.join(30)
    assert answers == [False]


def test_a_block_inside_another_one_does_not_end_it() -> None:
    """A periodic save inside an evaluation: afterwards the thread is still between two steps."""
    gate = StepGate(4)
    gate.leave_step()
    gate.leave_step()
    assert not gate.enter_step()
    assert gate.close() == 4
    gate.open_until(None)
    assert not gate.enter_step()
    assert gate.close() == 5
