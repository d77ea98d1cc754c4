from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.core.moment import Moment
from mindx_elastic.errors import UsageError
from mindx_elastic.persist.retention import CheckpointFact, choose_deletions


def periodic(step: int, *, minute: float | None = None, kind: str = "periodic", run: str = "a") -> CheckpointFact:
    created = 1000.0 + 60.0 * (step if minute is None else minute)
    return CheckpointFact(path=Path(f"{run}-{step}-{kind}"), step=step, kind=kind, created=created, run_id=run)


def decide(
    files: list[CheckpointFact],
    *,
    keep_max: int | None = None,
    minutes: float | None = None,
    protect: tuple[int, ...] = (),
) -> list[int]:
    chosen = choose_deletions(
        files, keep_max=keep_max, keep_per_n_minutes=minutes, protect=[("a", 0, step) for step in protect]
    )
    step_of = {fact.path: fact.step for fact in files}
    return [step_of[path] for path in chosen]


def test_keeps_the_newest_and_lists_the_oldest_first() -> None:
    assert decide([periodic(step) for step in (5, 1, 4, 2, 3)], keep_max=2) == [1, 2, 3]


def test_keep_max_wins_over_minutes_as_in_mindspore() -> None:
    files = [periodic(step) for step in range(1, 9)]
    assert decide(files, keep_max=6, minutes=100) == [1, 2]


def test_one_is_kept_for_each_interval_and_the_newest() -> None:
    files = [periodic(step, minute=step) for step in range(13)]
    assert decide(files, minutes=5) == [1, 2, 3, 4, 6, 7, 8, 9, 11]  # keeps 0, 5, 10 and the newest, 12


def test_deciding_after_each_save_keeps_the_same_as_deciding_at_the_end() -> None:
    alive: list[CheckpointFact] = []
    for step in range(13):
        alive.append(periodic(step, minute=step))
        gone = choose_deletions(alive, keep_max=None, keep_per_n_minutes=5, protect=())
        alive = [fact for fact in alive if fact.path not in gone]
    assert [fact.step for fact in alive] == [0, 5, 10, 12]


def test_protected_steps_stay_and_do_not_push_newer_ones_out() -> None:
    files = [periodic(step) for step in range(1, 6)]
    assert decide(files, keep_max=2, protect=(1,)) == [2, 3]


def test_low_steps_written_later_are_the_newer_ones() -> None:
    # A second run in the same directory starts at step 1 again; its files are the ones to keep.
    old = [periodic(step, minute=step, run="old") for step in (100, 200)]
    new = [periodic(step, minute=1000 + step, run="new") for step in (1, 2)]
    assert decide(old + new, keep_max=2) == [100, 200]


def test_equal_steps_of_two_attempts_are_two_moments() -> None:
    """Somebody resumed from a path: attempt 1 passed step 7 once more."""
    old, new = periodic(7, minute=1), replace(periodic(7, minute=2), attempt=1, path=Path("new"))
    for protect in ([], [("a", 1, 7)]):
        gone = choose_deletions([old, new], keep_max=1, keep_per_n_minutes=None, protect=protect)
        assert gone == [old.path]
    assert choose_deletions([old, new], keep_max=1, keep_per_n_minutes=None, protect=[("a", 0, 7)]) == []


@pytest.mark.parametrize(
    ("keep_max", "minutes", "named"),
    [
        (-1, None, "keep_checkpoint_max=-1"),
        (None, -0.5, "per_n_minutes=-0.5"),
        (None, math.nan, "per_n_minutes=nan"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(keep_max: int | None, minutes: float | None, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        decide([periodic(1)], keep_max=keep_max, minutes=minutes)


_FACTS = st.lists(
    st.builds(
        CheckpointFact,
        path=st.integers(0, 10**6).map(lambda n: Path(f"f{n}")),
        step=st.integers(0, 30),
        kind=st.sampled_from(["periodic", "periodic", "periodic", "manual", "breakpoint", "request_exit", "eval"]),
        created=st.floats(0, 1e5, allow_nan=False),
        run_id=st.sampled_from(["a", "b"]),
        attempt=st.integers(0, 2),
    ),
    unique_by=lambda fact: fact.path,
    max_size=30,
)


@given(
    files=_FACTS,
    keep_max=st.none() | st.integers(0, 8),
    minutes=st.none() | st.floats(0, 500, allow_nan=False),
    protect=st.sets(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(0, 30)), max_size=4),
)
def test_what_may_never_be_deleted(
    files: list[CheckpointFact], keep_max: int | None, minutes: float | None, protect: set[Moment]
) -> None:
    gone = set(choose_deletions(files, keep_max=keep_max, keep_per_n_minutes=minutes, protect=protect))
    deleted = [fact for fact in files if fact.path in gone]
    assert len(gone) == len(deleted)
    assert all(fact.kind == "periodic" and fact.moment not in protect for fact in deleted)
    countable = [fact for fact in files if fact.kind == "periodic"]
    if countable:  # the newest may be shared by several moments; one of them stays
        newest = max(fact.created for fact in countable)
        assert any(fact.created == newest and fact.path not in gone for fact in countable)
    if keep_max:
        left = {fact.moment for fact in countable if fact.path not in gone}
        assert len(left - protect) <= keep_max
        assert len(left) >= min(keep_max, len({fact.moment for fact in countable}))
