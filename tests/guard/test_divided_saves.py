"""Who divides a save with whom, and whose small state goes into which file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer
from mindx_elastic.agreement.stop_step import Decision
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.guard.divided_saves import NUM_NEIGHBOURS, WORTH_BYTES, Agreed, DividedSaves, SavesPart, neighbours
from mindx_elastic.guard.policy import ExitPolicy


def said(disk: str = "one", **other: Any) -> dict[str, Any]:
    own = {"disk": disk, "policies": [["breakpoint"]], "once": [], "replica": True, "nbytes": WORTH_BYTES}
    return {**own, "saves": True, "node": "one", **other}


def groups(*each: dict[str, Any]) -> list[list[int]]:
    return [own[0] for own in SavesPart([], [], [], 0, can=False).merge(each).own or ()]


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ([said()] * 4, [[0, 1, 2, 3]] * 4),
        ([said("one")] * 3 + [said("two")] * 3, [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3),
        ([said(), said()], [[], []]),  # two copies need three ranks
        ([said(), said(), said(), said("")], [[0, 1, 2]] * 3 + [[]]),  # a disk that is not known
        ([said(), said(), said(replica=False)], [[]] * 3),
        ([said(), said(), said(policies=[["other"]])], [[]] * 3),
        ([said(), said(), said(nbytes=WORTH_BYTES - 1)], [[]] * 3),
    ],
)
def test_ranks_of_one_disk_divide_where_all_are_alike(each: list[dict[str, Any]], expected: list[list[int]]) -> None:
    assert groups(*each) == expected


def test_other_saves_are_divided_only_where_all_want_no_redundancy() -> None:
    part = SavesPart([], [], [], 0, can=False)
    once = [["ckpt", "job"]]
    alike = part.merge([said(once=once), said(once=once)]).own
    differ = part.merge([said(once=once), said()]).own
    assert alike is not None and [own[1] for own in alike] == [[0, 1]] * 2
    assert differ is not None and [own[1] for own in differ] == [[], []]


# --- whose small states a file holds ---


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_small_states_survive_the_loss_of_any_rank_or_node(sizes: list[int]) -> None:
    nodes = [f"node {number}" for number, size in enumerate(sizes) for _ in range(size)]
    kept = neighbours(nodes)
    size = len(nodes)
    for rank in range(size):
        keepers = [each for each in range(size) if rank in kept[each]]
        assert rank not in keepers and len(keepers) == min(NUM_NEIGHBOURS, size - 1)
        assert len(sizes) == 1 or {nodes[each] for each in keepers} - {nodes[rank]}, "its node may be lost"


def test_neighbours_on_other_nodes_are_spread() -> None:
    kept = neighbours(["a"] * 4 + ["b"] * 4)
    assert [len(each) for each in kept] == [2] * 8
    assert neighbours(["a"] * 4) == [[2, 3], [0, 3], [0, 1], [1, 2]]


def test_the_meeting_says_whose_small_states_a_rank_keeps() -> None:
    part = SavesPart([], [], [], 0, can=False)
    merged = part.merge([said(node="a"), said(node="a"), said(node="b"), said(node="b")])
    assert merged.own is not None
    part.hear(Answer(merged.common, merged.own[3], lambda keys: []))
    assert part.neighbours == (1, 2)


def test_files_that_are_copied_to_other_nodes_are_whole_and_hold_small_states(tmp_path: Path) -> None:
    """A fault report takes the trust from a rank's file, and from its copies."""
    policy = ExitPolicy(directory=tmp_path, kind="breakpoint", alarms=frozenset({"signal"}), name=lambda position: "f")
    each = [SavesPart([policy], [], [tmp_path], WORTH_BYTES, can=True, divides=False).say() for _ in range(3)]
    merged = SavesPart([], [], [], 0, can=False).merge(each)
    assert merged.own is not None and merged.common is True
    assert [own[0] for own in merged.own] == [[], [], []]


def test_directories_of_nodes_may_have_other_names(tmp_path: Path) -> None:
    each = []
    for node in range(2):
        directory = tmp_path / f"node_{node}"
        directory.mkdir()
        policy = ExitPolicy(
            directory=directory, kind="breakpoint", alarms=frozenset({"signal"}), name=lambda position: "f"
        )
        each.append(SavesPart([policy], [], [directory], WORTH_BYTES, can=True, node=f"node {node}").say())
    merged = SavesPart([], [], [], 0, can=False).merge(each)
    assert merged.common is True and merged.own == [[[], [], [1]], [[], [], [0]]]


# --- the small states of neighbours ---


class _Rounds:
    """Decides as it is told. The others have told something; one may be dead by now."""

    def __init__(self, decision: Decision, told: dict[int, str]) -> None:
        self.decision, self.told = decision, told
        self.asked: set[int] = set()

    def decide(self, name: str, offer: object, timeout_s: float) -> Decision:
        return self.decision

    def tell(self, name: str, value: str) -> bool:
        self.told[0] = value
        return True

    def try_collect(self, name: str, ranks: Sequence[int] | None = None) -> list[str] | None:
        wanted = range(len(self.told)) if ranks is None else ranks
        self.asked.update(wanted)
        return [self.told[rank] for rank in wanted] if all(rank in self.told for rank in wanted) else None


def test_of_many_ranks_only_those_are_read_whose_words_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's small state is kilobytes: all of them for all ranks would be gigabytes in the seconds of a stop."""
    size = 512
    told = {rank: f" {base64.b64encode(b'%d' % rank).decode()}" for rank in range(size)}
    exchange = _Rounds(Decision(7), told)
    part = SavesPart([], [], [], 0, can=False)
    part.neighbours = (size - 2, size - 1)
    together = DividedSaves(
        cast("Exchange", exchange),
        RankInfo(rank=0, world_size=size),
        cast("Collector", None),
        part,
    )
    monkeypatch.setattr(together, "_pack", lambda: b"mine")
    assert together.agree(7, {}, {}, 1.0) == Agreed(None, {size - 2: b"510", size - 1: b"511"})
    assert exchange.asked <= {size - 2, size - 1}
