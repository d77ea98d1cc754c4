"""Who divides a save with whom."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer
from mindx_elastic.agreement.stop_step import Decision
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.guard.divided_saves import WORTH_BYTES, DividedSaves, SavesPart, UnevenModules
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


@pytest.mark.parametrize(("other", "expected"), [([["ckpt", "job"]], [[0, 1]] * 2), ([], [[], []])])
def test_other_saves_are_divided_only_where_all_want_no_redundancy(other: Any, expected: Any) -> None:
    merged = SavesPart([], [], [], 0, divides=False).merge([said(once=[["ckpt", "job"]]), said(once=other)]).own
    assert merged is not None and [own[1] for own in merged] == expected


def test_files_that_are_copied_to_other_nodes_are_whole(tmp_path: Path) -> None:
    """A fault report takes the trust from a rank's file, and from its copies."""
    policy = ExitPolicy(directory=tmp_path, kind="breakpoint", alarms=frozenset({"signal"}), name=lambda position: "f")
    assert groups(*[SavesPart([policy], [], [tmp_path], WORTH_BYTES, divides=False).say()] * 3) == [[], [], []]


@pytest.mark.parametrize(("decision", "divides"), [(Decision(7), True), (Decision(8), False), (Decision(None), False)])
def test_a_rank_writes_its_part_only_where_all_save_the_same_step(
    decision: Decision, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = SimpleNamespace(
        tell=lambda name, value: True,
        decide=lambda name, offer, timeout_s: decision,
        try_collect=lambda name, ranks: ["same"] * len(ranks),
    )
    part = SavesPart([], [], [], 0, divides=True)
    part.group = part.group._replace(ranks=(0, 1, 2))
    saves = DividedSaves(cast("Exchange", exchange), RankInfo(rank=0, world_size=3), cast("Collector", None), part)
    mine: Any = SimpleNamespace(key="same")
    monkeypatch.setattr(saves, "share", lambda *state: mine)
    assert saves.agree(7, {}, {}, 1.0) is (mine if divides else None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_module_of_one_rank_alone_is_told_there(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever rank it is; and one that all have, with other weights, on all."""
    said = [{"model": "a", "net": "x"}, {"model": "a", "net": "y"}]
    said[rank]["ema"] = "b"
    risks: list[str] = []
    for number in range(2):
        modules = {"model": None, "net": None} | ({"ema": None} if number == rank else {})
        collector = cast(Collector, SimpleNamespace(components=modules))
        part = UnevenModules(collector, cast(Any, SimpleNamespace(risk=lambda problem, remedy: risks.append(problem))))
        part.hear(Answer(part.merge(said).common, None, list))
        assert part.lacked == ([] if number == rank else ["ema"])
    assert [message.partition(":")[0] for message in caplog.messages] == ['not every rank has the module "ema"']
    assert len(risks) == 2 and all('module "net"' in each for each in risks), risks
