"""Values of ConfigMaps; mounts and check codes are in the tests of the faults that they hold."""

from __future__ import annotations

from mindx_elastic.platforms.config_map import time_stamp, whole_number


def test_ranks_and_times() -> None:
    assert (whole_number(3), whole_number(" 3 ")) == (3, 3)
    assert time_stamp(1690000000) == time_stamp("1690000000") == time_stamp(1690000000000) == 1690000000
    assert [time_stamp(value) for value in (0, -1, True, None, "noon", float("nan"), float("inf"), [1])] == [None] * 8
