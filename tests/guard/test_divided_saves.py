"""Who divides a save with whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.guard.divided_saves import WORTH_BYTES, SavesPart
from mindx_elastic.guard.policy import ExitPolicy


def said(disk: str = "one", **other: Any) -> dict[str, Any]:
    own = {"disk": disk, "policies": [["breakpoint"]], "once": [], "nbytes": WORTH_BYTES}
    return {**own, "saves": True, **other}


def groups(*each: dict[str, Any]) -> list[list[int]]:
    return [own[0] for own in SavesPart([], [], [], 0, divides=False).merge(each).own or ()]


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ([said()] * 4, [[0, 1, 2, 3]] * 4),
        ([said("one")] * 3 + [said("two")] * 3, [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3),
        ([said(), said()], [[], []]),  # two copies need three ranks
        ([said(), said(), said(), said("")], [[0, 1, 2]] * 3 + [[]]),  # a disk that is not known
        ([said(), said(), said(policies=[["other"]])], [[]] * 3),
        ([said(), said(), said(nbytes=WORTH_BYTES - 1)], [[]] * 3),
    ],
)
def test_ranks_of_one_disk_divide_where_all_are_alike(each: list[dict[str, Any]], expected: list[list[int]]) -> None:
    assert groups(*each) == expected


def test_other_saves_are_divided_only_where_all_want_no_redundancy() -> None:
    part = SavesPart([], [], [], 0, divides=False)
    once = [["ckpt", "job"]]
    alike = part.merge([said(once=once), said(once=once)]).own
    differ = part.merge([said(once=once), said()]).own
    assert alike is not None and [own[1] for own in alike] == [[0, 1]] * 2
    assert differ is not None and [own[1] for own in differ] == [[], []]


def test_files_that_are_copied_to_other_nodes_are_whole(tmp_path: Path) -> None:
    """A fault report takes the trust from a rank's file, and from its copies."""
    policy = ExitPolicy(directory=tmp_path, kind="breakpoint", alarms=frozenset({"signal"}), name=lambda position: "f")
    each = [SavesPart([policy], [], [tmp_path], WORTH_BYTES, divides=False).say() for _ in range(3)]
    merged = SavesPart([], [], [], 0, divides=False).merge(each)
    assert merged.own is not None
    assert [own[0] for own in merged.own] == [[], [], []]
