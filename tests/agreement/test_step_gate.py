"""The step gate between a training thread and a watcher."""

from __future__ import annotations

import threading

from mindx_elastic.agreement.step_gate import StepGate


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


# --- pauses ---


def waiting(gate: StepGate) -> tuple[threading.Thread, list[bool]]:
    """A training thread that waits in a pause; what the wait has told it in the end."""
    told, here = [], threading.Event()
    thread = threading.Thread(target=lambda: told.append(gate.wait_out_pause(here.set)), daemon=True)
    thread.start()
    assert here.wait(30)
    return thread, told


def test_a_pause_holds_the_rank_at_the_agreed_boundary_until_it_is_over() -> None:
    gate = StepGate(4)
    assert gate.pause() == 5
    assert gate.arrive(5)
    gate.pause_at(6)  # another rank is ahead
    assert gate.wait_out_pause(lambda: None) is False
    assert gate.arrive(6)
    thread, told = waiting(gate)
    assert gate.waits_at(6) and not gate.waits_at(7)
    gate.resume()
    thread.join(30)
    assert told == [False] and not gate.waits_at(6) and not gate.arrive(100)


def test_a_stop_takes_a_pause_over_at_the_boundary_where_the_rank_waits() -> None:
    gate = StepGate(4)
    gate.pause()
    assert gate.arrive(5)
    thread, told = waiting(gate)
    assert gate.close() == 5
    thread.join(30)
    assert told == [True], "to the stop's own wait"
    assert gate.pause() is None, "a stop is not paused"
    gate.pause_at(9)
    gate.resume()
    assert gate.at_limit(), "nor ended by a resume that comes late"
    gate.open_until(5)
    assert gate.wait(30) is True
