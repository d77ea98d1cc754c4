"""Values and objects of ConfigMaps; mounts and check codes are in the tests of the faults that they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindx_elastic.platforms.config_map import (
    data_of,
    load_json,
    parse_json_object,
    parse_yaml_object,
    time_stamp,
    whole_number,
)


def test_keys_that_stand_twice_are_listed_and_the_last_one_counts() -> None:
    twice: list[str] = []
    assert parse_json_object('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3, "a": 4}', twice) == {"a": 4, "b": {"c": 2}}
    assert twice == ["c", "a"]
    assert load_json('[{"a": 1, "a": 2}]') == [{"a": 2}]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"FaultRank": []}, None),
        ({"data": {"a": "b"}}, ({"a": "b"}, "")),
        ({"kind": "ConfigMap", "metadata": {"name": "n"}, "data": {}}, ({}, "n")),
        ({"kind": "ConfigMap", "metadata": [], "data": {}}, ({}, "")),
        ({"kind": "List", "items": [{"data": {"a": "b"}}]}, ({"a": "b"}, "")),
    ],
)
def test_the_data_of_a_config_map(content: dict[str, Any], found: tuple[dict[str, Any], str] | None) -> None:
    assert data_of(content) == found
    if found is not None:
        assert data_of(parse_yaml_object(json.dumps(content))) == found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kind": "Secret", "data": {}}, "of the kind 'Secret'"),
        ({"kind": "List", "items": []}, "holds 0 objects"),
        ({"kind": "List", "items": [{"items": [], "data": {}}]}, "holds 1 objects"),
        ({"kind": "ConfigMap", "data": "text"}, "data section"),
    ],
)
def test_objects_that_are_no_config_map(content: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        data_of(content)


def test_ranks_and_times() -> None:
    assert (whole_number(3), whole_number(" 3 ")) == (3, 3)
    assert time_stamp(1690000000) == time_stamp("1690000000") == time_stamp(1690000000000) == 1690000000
    assert [time_stamp(value) for value in (0, -1, True, None, "noon", float("nan"), float("inf"), [1])] == [None] * 8
