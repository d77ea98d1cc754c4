"""Who divides a save with whom, and what is done for those who are not durable in time."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.stop_step import CANNOT, Decision
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.core.division import Division
from mindx_elastic.core.owners import Trust
from mindx_elastic.guard.together import WORTH_BYTES, Agreed, SavesPart, Together
from mindx_elastic.persist.format import Held


def said(disk: str = "one", **other: Any) -> dict[str, Any]:
    own = {"disk": disk, "policies": [["breakpoint"]], "once": [], "replica": True, "nbytes": WORTH_BYTES, "copies": 2}
    return {**own, **other}


def groups(*each: dict[str, Any]) -> list[list[int]]:
    return [own[0] for own in SavesPart([], [], [], 0, can=False).merge(each).own or ()]


def test_ranks_of_one_disk_divide() -> None:
    assert groups(*[said()] * 4) == [[0, 1, 2, 3]] * 4
    assert groups(*[said("one")] * 3, *[said("two")] * 3) == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3


def test_two_copies_need_three_ranks_and_one_copy_two() -> None:
    assert groups(said(), said()) == [[], []]
    assert groups(said(copies=1), said(copies=1)) == [[0, 1]] * 2
    assert groups(said(copies=1), said(copies=2)) == [[], []], "who asks for two gets two"


@pytest.mark.parametrize(
    "other",
    [{"replica": False}, {"policies": [["other"]]}, {"nbytes": WORTH_BYTES - 1}],
    ids=["no replica", "another policy", "small"],
)
def test_one_rank_that_differs_ends_it_for_all(other: dict[str, Any]) -> None:
    assert groups(said(), said(), said(**other)) == [[], [], []]


def test_a_rank_whose_disk_is_not_known_writes_all() -> None:
    assert groups(said(), said(), said(), said("")) == [[0, 1, 2]] * 3 + [[]]


def test_a_small_state_is_divided_where_one_copy_is_wanted() -> None:
    assert groups(*[said(copies=1, nbytes=5)] * 3) == [[0, 1, 2]] * 3


def test_other_saves_are_divided_only_where_all_want_no_redundancy() -> None:
    part = SavesPart([], [], [], 0, can=False)
    once = [["ckpt", "job"]]
    alike = part.merge([said(once=once), said(once=once)]).own
    differ = part.merge([said(once=once), said()]).own
    assert alike is not None and [own[1] for own in alike] == [[0, 1]] * 2
    assert differ is not None and [own[1] for own in differ] == [[], []]


class _Exchange:
    """Decides as it is told."""

    def __init__(self, decision: Decision) -> None:
        self.decision, self.announced, self.patience_s = decision, [], 0.0  # type: ignore[var-annotated]

    def announce(self, name: str, offer: object) -> None:
        self.announced.append((name, offer))

    def decide(self, name: str, offer: object, timeout_s: float) -> Decision:
        self.patience_s = timeout_s
        return self.decision


HELD = Held(Division.of({"a": ("F32", (64, 8), 2048), "b": ("F32", (32, 8), 1024)}, 3), (0, 1), "sample")


def settle(
    decision: Decision, lacking: list[int], *, left_s: float = 10.0, **other: Any
) -> tuple[list[Held], _Exchange]:
    exchange, covered = _Exchange(decision), list[Held]()
    together = Together(
        cast("Exchange", exchange),
        RankInfo(rank=0, world_size=3),
        cast("Collector", None),
        cast("Trust", None),
        SavesPart([], [], [], 0, can=False),
    )
    arguments: dict[str, Any] = {"saved": True, "began": time.monotonic(), **other}
    together.settle(
        arguments.pop("agreed", Agreed(HELD)),
        7,
        time_left_s=lambda: left_s,
        find=lambda: lacking,
        cover=covered.append,
        **arguments,
    )
    return covered, exchange


def test_nothing_is_covered_where_all_are_durable() -> None:
    covered, _ = settle(Decision(7), [0, 1, 2])
    assert covered == []


def test_what_others_lack_is_covered_and_what_this_rank_has_is_not() -> None:
    covered, exchange = settle(Decision(None, "rank 2 is gone"), [1, 2])
    assert [each.parts for each in covered] == [(2,)]
    assert 4.0 < exchange.patience_s <= 5.0, "half of the time that is left"


def test_a_short_time_leaves_the_others_as_long_as_this_rank_took() -> None:
    covered, exchange = settle(Decision(None, "late"), [2], left_s=0.2)
    assert [each.parts for each in covered] == [(2,)]
    assert exchange.patience_s > 0


def test_a_rank_that_has_not_saved_says_so_and_covers_nobody() -> None:
    covered, exchange = settle(Decision(7), [2], saved=False)
    assert covered == [] and exchange.announced == [("durable", CANNOT)]


def test_a_rank_that_has_written_all_waits_for_nobody() -> None:
    covered, exchange = settle(Decision(None), [2], agreed=Agreed(None))
    assert covered == [] and exchange.announced == [("durable", 7)]


# --- the small states of neighbours ---


class _Rounds(_Exchange):
    """The others have told something; one may be dead by now."""

    def __init__(self, decision: Decision, told: dict[int, str]) -> None:
        super().__init__(decision)
        self.told = told

    def tell(self, name: str, value: str) -> bool:
        self.told[0] = value
        return True

    def try_collect(self, name: str, ranks: Sequence[int] | None = None) -> list[str] | None:
        wanted = range(3) if ranks is None else ranks
        return [self.told[rank] for rank in wanted] if all(rank in self.told for rank in wanted) else None


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({}, {}),
        ({1: (7, b"one")}, {1: b"one"}),
        ({1: (6, b"of another step"), 2: (7, b"two")}, {2: b"two"}),
        ({1: (7, b""), 2: (7, b"two")}, {2: b"two"}),
    ],
)
def test_what_a_rank_had_told_before_it_died_is_kept(
    monkeypatch: pytest.MonkeyPatch, told: dict[int, tuple[int, bytes]], kept: dict[int, bytes]
) -> None:
    texts = {rank: json.dumps([step, "", base64.b64encode(small).decode()]) for rank, (step, small) in told.items()}
    exchange = _Rounds(Decision(None, "rank 1 is gone"), texts)
    part = SavesPart([], [], [], 0, can=False)
    together = Together(
        cast("Exchange", exchange), RankInfo(rank=0, world_size=3), cast("Collector", None), cast("Trust", None), part
    )
    monkeypatch.setattr(together, "_pack", lambda: b"mine")
    assert together.agree(7, {}, {}, 1.0) == Agreed(None, kept)
    assert json.loads(exchange.told[0])[0] == 7


def test_text_that_is_no_small_state_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = _Rounds(Decision(None, "rank 1 is gone"), {1: "[]", 2: '[7, "", "?"]'})
    part = SavesPart([], [], [], 0, can=False)
    together = Together(
        cast("Exchange", exchange), RankInfo(rank=0, world_size=3), cast("Collector", None), cast("Trust", None), part
    )
    monkeypatch.setattr(together, "_pack", lambda: b"mine")
    assert together.agree(7, {}, {}, 1.0) == Agreed(None, {})
