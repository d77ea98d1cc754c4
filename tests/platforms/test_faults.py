"""One-shot reading of faults: every documented form, and nothing but a UsageError with the path for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindx_elastic.config import FaultPaths
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.faults import (
    default_fault_sources,
    merge,
    parse_rank_list,
    parse_text,
    read_faults,
)

REPORT = '{"FaultRankIds":["1","3"],"CreatTime":1690000000}'


def entry(rank: object = 1, status: object = "unrecovered", policy: object = "restart") -> dict[str, object]:
    return {"RankId": rank, "LogicId": 1, "Status": status, "Policy": policy, "ErrorCode": [], "ErrorCodeHex": ""}


def put(folder: Path, content: object, name: str = "faults.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        read_faults(path, **{"world_size": 8, **options})
    text = str(caught.value)
    assert str(path) in text and len(text) < 700, text
    return text


# --- the documented forms of ranks ---


@pytest.mark.parametrize(
    ("content", "ranks", "created"),
    [
        (REPORT, {1, 3}, 1690000000),
        ({"FaultRankIds": ["2"], "FaultRank": [5, 2]}, {2, 5}, None),
        ({"FaultRankIds": '["1","3"]', "CreatTime": 1690000000}, {1, 3}, 1690000000),  # the first schedulers
        ({"FaultRankIds": "null"}, set(), None),
        ({"FaultRankIds": None}, set(), None),
        ({"FaultRankIds": ["1"], "CreateTime": "1690000000"}, {1}, 1690000000),
        ({"FaultRank": [1, 3], "UpdateTime": 1690000000123}, {1, 3}, 1690000000.123),
        ({"FaultRankIds": []}, set(), None),
        (
            {"RankList": [entry(2, policy="reset"), entry("3", policy="isolate")], "UpdateTime": 1690000000},
            {2, 3},
            169e7,
        ),
        ({"RankList": [entry(4, "recovered"), entry(5, policy="ignore"), entry(6, "", "empty")]}, set(), None),
    ],
)
def test_reports_of_ranks(tmp_path: Path, content: object, ranks: set[int], created: float | None) -> None:
    path = put(tmp_path, content)
    faults = read_faults(path, world_size=8)
    assert (set(faults.ranks), faults.created, faults.source) == (ranks, created, str(path))
    assert not faults.initializing and not faults.problems


def test_the_parser_lists_its_problems_and_a_strict_caller_raises_on_them(tmp_path: Path) -> None:
    report = json.dumps({"FaultRank": [1, 9, "x"], "CreatTime": "noon"})
    faults = parse_text(report, world_size=8)
    assert faults.ranks == {1} == faults.unrecovered
    assert faults.problems == (
        "names rank 9 in FaultRank, but the job has ranks 0..7",
        "names 'x' in FaultRank, which is not a rank",
    )
    assert faults.created is None
    assert "; ".join(faults.problems) in refusal(put(tmp_path, report))
    put(tmp_path, json.dumps({"FaultRank": [1]}), "fault-npus")
    put(tmp_path, json.dumps({"RankList": [entry(2), entry(3, "Lost")]}), "reset.json")
    assert "/reset.json has the Status 'Lost' for rank 3; known: " in refusal(tmp_path)


def test_a_failed_recovery_is_a_fault_that_stops_no_job() -> None:
    content = {"RankList": [entry(1), entry(2, "failed")], "GracefulExit": 1}
    faults = parse_text(json.dumps(content), world_size=8)
    assert faults.ranks == {1, 2} and faults.unrecovered == {1} and faults.exit_requested


# --- a mounted ConfigMap ---


def test_a_mounted_folder(tmp_path: Path) -> None:
    put(tmp_path, REPORT + "\n", "fault-npus")
    put(tmp_path, "of another text", "checkCode")
    assert read_faults(tmp_path, world_size=8).ranks == {1, 3}
    assert read_faults(tmp_path / "fault-npus", world_size=8).ranks == {1, 3}
    put(tmp_path, {"RankList": [entry(2)]}, "reset.json")
    assert read_faults(tmp_path, world_size=8).ranks == {1, 2, 3}


# --- what is refused ---


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"FaultRankIds": ["8"]}, "names rank 8 in FaultRankIds, but the job has ranks 0..7"),
        ({"FaultRanksIds": ["1"]}, "has none of the keys FaultRankIds, FaultRank"),
        ({"RankList": [entry(1, "Unrecoverd")]}, "has the Status 'Unrecoverd' for rank 1"),
        ({"RankList": [], "FaultRank": []}, "at once"),
        ('{"FaultRankIds": ["1"], "CreatTime": 1, "FaultRankIds": ["2"]}', "the key 'FaultRankIds' twice"),
        ({"kind": "ConfigMap", "data": {"fault-npus": REPORT}}, "expected what stands under fault-npus"),
    ],
)
def test_what_is_no_report(tmp_path: Path, content: object, said: str) -> None:
    path = put(tmp_path, content, "faults.txt")
    assert said in refusal(path)


# --- rank lists, merging, defaults ---


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).map(sorted), max_size=4))
def test_a_rank_list_is_the_union_of_its_parts(parts: list[list[int]]) -> None:
    text = " , ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    expected = {rank for first, last in parts for rank in range(first, last + 1)}
    assert parse_rank_list(text, world_size=8) == expected


def test_a_rank_list_has_a_bound() -> None:
    with pytest.raises(UsageError, match="more than 1048576 ranks"):
        parse_rank_list(",".join(["0-999999"] * 1000))


def test_the_mounted_files_by_default(tmp_path: Path) -> None:
    env = {"MINDX_FAULT_DIR": str(tmp_path / "fault"), "MINDX_RESET_DIR": str(tmp_path / "reset")}
    assert default_fault_sources(FaultPaths.from_env(env)) == ()
    first = put(tmp_path / "fault", REPORT, "fault-npus")
    second = put(tmp_path / "reset", {"RankList": [entry(6)]}, "reset.json")
    assert default_fault_sources(FaultPaths.from_env(env)) == (first, second)
    faults = merge(*(read_faults(source, world_size=8) for source in (first, second)))
    assert faults.ranks == {1, 3, 6} and faults.source == f"{first}, {second}"
    put(tmp_path / "reset", "{}", "reset.json")
    assert read_faults(second, world_size=8).ranks == set()
    put(tmp_path / "reset", "{", "reset.json")
    with pytest.raises(UsageError, match=r"reset\.json"):
        read_faults(second, world_size=8)


# --- anything at all ---


T = TypeVar("T")


def outcome(call: Callable[[], T]) -> tuple[T | None, str]:
    """What it gives, or what its ValueError (a UsageError is one) says; any other exception fails the test."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
keys = st.sampled_from(["FaultRankIds", "FaultRank", "CreatTime", "UpdateTime", "status", "RankList", "GracefulExit"])
entries = st.fixed_dictionaries({"RankId": json_values, "Status": json_values, "Policy": json_values})
values = json_values | st.just("ConfigMap") | st.lists(entries | json_values, max_size=2) | json_values.map(json.dumps)
objects = st.dictionaries(keys | st.text(max_size=5), values | st.dictionaries(keys, values, max_size=3), max_size=5)
texts = objects.map(json.dumps) | st.text(max_size=40)


@settings(max_examples=300, deadline=None)
@given(text=texts, cut=st.integers(0, 60), world_size=st.none() | st.integers(1, 8))
@example(text='{"FaultRank": ["\\ud800"]}', cut=0, world_size=None)
def test_any_text_is_a_report_or_a_value_error(text: str, cut: int, world_size: int | None) -> None:
    for part in (text, text[: max(len(text) - cut, 0)]):
        faults, said = outcome(partial(parse_text, part, world_size=world_size))
        if faults is None:
            assert said
            said.encode()  # can be printed
            continue
        "; ".join(map(str, faults.problems)).encode()
        assert faults.unrecovered <= faults.ranks
        assert all(type(rank) is int and rank >= 0 for rank in faults.ranks)
        assert world_size is None or max(faults.ranks, default=0) < world_size


@settings(max_examples=100, deadline=None)
@given(text=st.text("0123456789,- ", max_size=12) | st.text(max_size=8))
def test_any_rank_list_is_one_or_a_usage_error(text: str) -> None:
    ranks, said = outcome(lambda: parse_rank_list(text, world_size=100))
    assert said.startswith("rank list ") if ranks is None else all(0 <= rank < 100 for rank in ranks)
