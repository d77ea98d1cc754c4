"""Which periodic files go: by count or by minutes, never the newest moment nor a protected one."""

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


def periodic(step: int, *, minute: float | None = None, run: str = "a") -> CheckpointFact:
    created = 1000.0 + 60.0 * (step if minute is None else minute)
    return CheckpointFact(path=Path(f"{run}-{step}"), step=step, kind="periodic", created=created, run_id=run)


def decide(files: list[CheckpointFact], *, keep_max: int | None = None, minutes: float | None = None) -> list[int]:
    chosen = choose_deletions(files, keep_max=keep_max, keep_per_n_minutes=minutes, protect=())
    step_of = {fact.path: fact.step for fact in files}
    return [step_of[path] for path in chosen]


def test_one_is_kept_for_each_interval_and_the_newest_at_the_end_and_after_each_save() -> None:
    files = [periodic(step) for step in range(13)]
    assert decide(files, minutes=5) == [1, 2, 3, 4, 6, 7, 8, 9, 11]
    alive: list[CheckpointFact] = []
    for fact in files:
        alive.append(fact)
        gone = decide(alive, minutes=5)
        alive = [one for one in alive if one.step not in gone]
    assert [fact.step for fact in alive] == [0, 5, 10, 12]


def test_keep_max_wins_over_minutes_as_in_mindspore() -> None:
    assert decide([periodic(step) for step in range(1, 9)], keep_max=6, minutes=100) == [1, 2]


def test_low_steps_written_later_are_the_newer_ones() -> None:
    """A second run, or a second attempt from an older step, in the same directory."""
    old = [periodic(step, run="old") for step in (100, 200)]
    new = [periodic(step, minute=1000 + step, run="new") for step in (1, 2)]
    assert decide(old + new, keep_max=2) == [100, 200]
    again = replace(old[0], attempt=1, created=1e6, path=Path("again"))
    assert choose_deletions([*old, again], keep_max=1, keep_per_n_minutes=None, protect=()) == [
        fact.path for fact in old
    ]


@pytest.mark.parametrize(
    ("keep_max", "minutes", "named"),
    [(-1, None, "keep_checkpoint_max=-1"), (None, -0.5, "per_n_minutes=-0.5"), (None, math.nan, "per_n_minutes=nan")],
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
    gone = choose_deletions(files, keep_max=keep_max, keep_per_n_minutes=minutes, protect=protect)
    deleted = [fact for fact in files if fact.path in gone]
    assert len(set(gone)) == len(gone) == len(deleted)
    assert all(fact.kind == "periodic" and fact.moment not in protect for fact in deleted)
    countable = [fact for fact in files if fact.kind == "periodic"]
    written = {fact.moment: max(f.created for f in countable if f.moment == fact.moment) for fact in countable}
    ages = [written[fact.moment] for path in gone for fact in deleted if fact.path == path]
    assert ages == sorted(ages), "the oldest first"
    left = {fact.moment for fact in countable if fact.path not in gone}
    assert not written or max(written.values()) in [written[moment] for moment in left]
    assert left | {fact.moment for fact in deleted} == written.keys() and not left & {fact.moment for fact in deleted}
    if keep_max:
        assert len(left - protect) <= keep_max
        assert len(left) >= min(keep_max, len(written))
        times = written.__getitem__
        assert max(map(times, written.keys() - left), default=0) <= min(map(times, left - protect), default=1e6)
