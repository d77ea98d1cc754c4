"""The comparison, on witnesses that are made by hand."""

from __future__ import annotations

from dataclasses import replace

from mindx_elastic.prove.compare import Difference, Reference, compare_life, compare_variables
from tests.prove.made import REFERENCE, life, step


def test_steps_after_the_end_of_the_proof_are_left_out() -> None:
    cut = Reference(lives=[life([step(n) for n in range(1, 21)], outcome="ended")])
    assert compare_life(cut, life([step(20), step(21)], resumed=19)) is None


def test_a_state_that_code_behind_an_epoch_has_changed_is_the_one_of_its_boundary() -> None:
    changed = {**step(14).end, "option|optimizer lr": "0.09"}
    tail = Reference(lives=[life([replace(step(n), behind=changed if n == 14 else None) for n in range(1, 21)])])

    def resumed(rate: str) -> Difference | None:
        found = life([step(n) for n in range(15, 21)], resumed=14)
        found.entered = {**found.entered, "option|optimizer lr": rate}
        return compare_life(tail, found)

    assert resumed("0.09") is None and resumed("0.1") is None, "saved behind that code, and in front of it"
    found = resumed("0.3")
    assert found is not None and found.parts[0].where == "entry" and found.parts[0].first == "0.09"


def test_a_training_that_ends_with_an_exception_of_its_own_has_ended() -> None:
    left = Reference(lives=[life([step(n) for n in range(1, 21)], outcome="SystemExit")])
    assert left.has_ended
    found = compare_life(left, life([step(n) for n in range(20, 23)], resumed=19, outcome="SystemExit"))
    assert found is not None and found.parts[0].kind == "too many" and found.step == 21


def test_states_of_named_objects_alone_are_a_fact() -> None:
    found = compare_life(
        REFERENCE, life([replace(step(15), end={**step(15).end, "stateful|log.0": "9 s"})], resumed=14)
    )
    assert found is not None and found.is_fact


def test_a_container_that_the_resumed_run_has_not_made_is_a_variable_that_it_lacks() -> None:
    stopped = {'variable|the length of "reference" (train.py)': "2", 'variable|"reference[0]" (train.py)': "0.5"}
    found, equal = compare_variables(
        {**stopped, 'variable|"n" (train.py)': "1"},
        {'variable|"reference" (train.py)': "None", 'variable|"n" (train.py)': "1"},
    )
    assert ([str(each) for each in found], equal) == (["reference (length 2, now None)"], 1)
    assert compare_variables(stopped, {}) == ([], 0)
