"""For how long a rank must be slow until it is named, and be so no longer until that is said."""

from __future__ import annotations

from mindx_elastic.agent.slow import SlowWatch
from mindx_elastic.core.pace import SlowRank

ONE, TWO = SlowRank(1, 30_000, 80_000), SlowRank(2, 20_000, 80_000)


def test_a_rank_is_named_once_when_it_has_been_slow_for_five_seconds() -> None:
    watch = SlowWatch()
    assert watch.look([ONE], 0.0) == watch.look([ONE], 4.9) == ([], [])
    assert watch.look([ONE], 5.0) == ([ONE], []) and watch.named == {1: ONE}
    assert watch.look([ONE, TWO], 5.5) == ([], [])
    later = SlowRank(1, 40_000, 90_000)
    assert watch.look([later, TWO], 10.5) == ([TWO], []) and watch.named == {1: later, 2: TWO}
    assert watch.look([TWO], 11.0) == watch.look([TWO], 70.0) == ([], [])
    assert watch.look([TWO], 71.0) == ([], [later]) and watch.named == {2: TWO}


def test_what_comes_and_goes_is_not_said() -> None:
    watch = SlowWatch()
    for second in range(60):
        assert watch.look([ONE] if second % 4 else [], float(second)) == ([], [])
    watch.look([ONE], 60.0)
    assert watch.look([ONE], 66.0) == ([ONE], [])
    for second in range(67, 600):
        assert watch.look([] if second % 50 else [ONE], float(second)) == ([], [])


def test_a_new_attempt_is_judged_anew() -> None:
    watch = SlowWatch()
    watch.look([ONE], 0.0)
    watch.look([ONE], 6.0)
    watch.reset()
    assert not watch.named and watch.look([ONE], 7.0) == ([], [])
