"""The comparison, on witnesses that are made by hand."""

from __future__ import annotations

from dataclasses import replace

from mindx_elastic.prove.compare import Reference, compare_life, compare_steps
from tests.prove.made import REFERENCE, life, step


def test_equal_runs_do_not_differ() -> None:
    assert compare_life(REFERENCE, life([step(n) for n in range(15, 21)], resumed=14)) is None
    assert list(compare_steps(step(3), step(3))) == []


def test_what_is_fetched_ahead_and_handed_out_again_is_equal() -> None:
    again = step(15, batches=("kept", step(15).batches[0]))
    assert compare_life(REFERENCE, life([again], resumed=14)) is None
    unseen = Reference(lives=[life([step(n, inputs={}) for n in range(1, 21)])])
    assert compare_life(unseen, life([replace(again, inputs={})], resumed=14)) is None


def test_steps_after_the_end_of_the_proof_are_left_out() -> None:
    cut = Reference(lives=[life([step(n) for n in range(1, 21)], outcome="ended")])
    assert compare_life(cut, life([step(20), step(21)], resumed=19)) is None


def test_unseeded_streams_and_varying_scalars_are_left_out() -> None:
    other = step(15, begin={"torch": "x"}, scalars={"scalar|loss": "y"})
    kept = Reference(lives=REFERENCE.lives, unseeded=frozenset({"torch"}), varying=frozenset({"scalar|loss"}))
    assert compare_life(kept, life([replace(other, streams={"torch": "z"})], resumed=14)) is None
