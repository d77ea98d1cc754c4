"""How much of the grace period is kept for the save."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.alarm.deadline import reserve_s

GiB = 1 << 30


@given(st.integers(0, 1 << 45), st.floats(0.5, 86400), st.none() | st.floats(1e3, 1e11))
def test_the_reserve_leaves_half_of_the_grace_period(nbytes: int, grace_s: float, speed: float | None) -> None:
    reserve = reserve_s(nbytes, grace_s, bytes_per_s=speed)
    assert 0 < reserve <= grace_s / 2
    assert reserve <= reserve_s(nbytes + GiB, grace_s, bytes_per_s=speed)


def test_a_measured_speed_replaces_the_assumed_one() -> None:
    assert reserve_s(GiB, 600, bytes_per_s=2e9) < reserve_s(GiB, 600) < reserve_s(GiB, 600, bytes_per_s=5e7)
