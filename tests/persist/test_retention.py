"""Which periodic files go: by count or by minutes, never the newest moment nor a protected one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.core.moment import Moment
from mindx_elastic.errors import UsageError
from mindx_elastic.persist.retention import choose_deletions


def decide(steps: list[int], *, keep_max: int | None = None, minutes: float | None = None) -> list[int]:
    """What goes of a run that has saved these steps, each in the minute of its number."""
    created = {("a", 0, step): 1000.0 + 60.0 * step for step in steps}
    gone = choose_deletions(created, keep_max=keep_max, keep_per_n_minutes=minutes, protect=())
    return [step for _, _, step in gone]


def test_one_is_kept_for_each_interval_and_the_newest_at_the_end_and_after_each_save() -> None:
    assert decide([*range(13)], minutes=5) == [1, 2, 3, 4, 6, 7, 8, 9, 11]
    alive: list[int] = []
    for step in range(13):
        alive.append(step)
        gone = decide(alive, minutes=5)
        alive = [one for one in alive if one not in gone]
    assert alive == [0, 5, 10, 12]


def test_keep_max_wins_over_minutes_as_in_mindspore() -> None:
    assert decide([*range(1, 9)], keep_max=6, minutes=100) == [1, 2]


def test_low_steps_written_later_are_the_newer_ones() -> None:
    """A second run, or a second attempt from an older step, in the same directory."""
    old: dict[Moment, float] = {("old", 0, 100): 100.0, ("old", 0, 200): 200.0}
    new: dict[Moment, float] = {("new", 0, 1): 1001.0, ("new", 0, 2): 1002.0}
    assert choose_deletions({**new, **old}, keep_max=2, keep_per_n_minutes=None, protect=()) == [*old]
    again: dict[Moment, float] = {("old", 1, 100): 1e6}
    assert choose_deletions({**again, **old}, keep_max=1, keep_per_n_minutes=None, protect=()) == [*old]


@pytest.mark.parametrize(
    ("keep_max", "minutes", "named"),
    [(-1, None, "keep_checkpoint_max=-1"), (None, -0.5, "per_n_minutes=-0.5"), (None, math.nan, "per_n_minutes=nan")],
)
def test_a_limit_that_makes_no_sense_is_refused(keep_max: int | None, minutes: float | None, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        decide([1], keep_max=keep_max, minutes=minutes)


_MOMENTS = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(0, 30))


@given(
    created=st.dictionaries(_MOMENTS, st.floats(0, 1e5, allow_nan=False), max_size=30),
    keep_max=st.none() | st.integers(0, 8),
    minutes=st.none() | st.floats(0, 500, allow_nan=False),
    protect=st.sets(_MOMENTS, max_size=4),
)
def test_what_may_never_be_deleted(
    created: dict[Moment, float], keep_max: int | None, minutes: float | None, protect: set[Moment]
) -> None:
    gone = choose_deletions(created, keep_max=keep_max, keep_per_n_minutes=minutes, protect=protect)
    assert len(set(gone)) == len(gone) and created.keys() >= {*gone} and protect.isdisjoint(gone)
    ages = [created[moment] for moment in gone]
    assert ages == sorted(ages), "the oldest first"
    left = created.keys() - {*gone}
    assert not created or max(created.values()) in [created[moment] for moment in left]
    if keep_max:
        assert len(left - protect) <= keep_max
        assert len(left) >= min(keep_max, len(created))
        assert max(ages, default=0) <= min((created[moment] for moment in left - protect), default=1e6)
