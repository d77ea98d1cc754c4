"""Values and objects of ConfigMaps; mounts and check codes are in the tests of the faults that they hold."""

from __future__ import annotations

from typing import Any

import pytest

from mindx_elastic.platforms.config_map import data_of, time_stamp, whole_number


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"FaultRank": []}, None),
        ({"data": {"a": "b"}}, {"a": "b"}),
        ({"kind": "ConfigMap", "data": {}}, {}),
        ({"kind": "List", "items": [{"data": {"a": "b"}}]}, {"a": "b"}),
    ],
)
def test_the_data_of_a_config_map(content: dict[str, Any], found: dict[str, Any] | None) -> None:
    assert data_of(content) == found


def test_ranks_and_times() -> None:
    assert (whole_number(3), whole_number(" 3 ")) == (3, 3)
    assert time_stamp(1690000000) == time_stamp("1690000000") == time_stamp(1690000000000) == 1690000000
    assert [time_stamp(value) for value in (0, -1, True, None, "noon", float("nan"), float("inf"), [1])] == [None] * 8
