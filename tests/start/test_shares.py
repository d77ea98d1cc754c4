"""A plan is encoded into answers and decoded on each rank: every rank gets its share; damaged answers are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.core.layout import Layout, parse_placement
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.start.facts import Refusal, ResumePlan, World
from mindx_elastic.start.inventory import Inventory
from mindx_elastic.start.shares import Share, share_in, tell_shares
from tests.start.looks import look, sent
from tests.start.worlds import Saved, target_of


class Told:
    """The shares of a plan, as the ranks receive them: through JSON."""

    def __init__(self, inventory: Inventory, world: World) -> None:
        plan = inventory.plan(world)
        assert not isinstance(plan, Refusal), plan
        self.plan: ResumePlan = plan
        self.merged: Merged = tell_shares(plan, inventory)
        self.asked: list[str] = []

    def more(self, keys: Sequence[str]) -> list[Any]:
        self.asked += keys
        return [json.loads(json.dumps(self.merged.more[key])) for key in keys]

    def answer(self, rank: int) -> Answer:
        assert self.merged.own is not None
        common, own = json.loads(json.dumps([self.merged.common, self.merged.own[rank]]))
        return Answer(common, own, self.more)

    def share(self, rank: int, target: Strategy | None = None) -> Share:
        return share_in(self.answer(rank), rank, target or Strategy(self.plan.world.size, ()))

    @property
    def shares(self) -> list[Share]:
        return [self.share(rank) for rank in range(self.plan.world.size)]


def inventory_of(places: Sequence[Path], **options: Any) -> Inventory:
    return Inventory.merge(sent(look(places, **options)))


def rows(world_size: int) -> Layout:
    return Layout((world_size,), (parse_placement("S(0)"),))


def resharded(root: Path) -> Told:
    """A step of 4 ranks on one disk, for 3 ranks."""
    Saved(4, {"w": (torch.arange(48.0).reshape(12, 4), rows(4))}).write(root)
    target = target_of(3, {"w": ((12, 4), rows(3))})
    return Told(inventory_of([root] * 3), World(3, target.own))


DAMAGE: dict[str, Callable[[Any, Any], object]] = {
    "a step that is a text": lambda common, own: common.update(moment=["run-a", 0, "seven"]),
    "a short row": lambda common, own: own["file"].pop(),
    "a file of no old rank": lambda common, own: own.update(others=[[4, *own["file"][1:]]]),
    "readers that are no ranks": lambda common, own: own["file"].__setitem__(2, [[0]]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_answer_is_refused(tmp_path: Path, damage: str) -> None:
    told = resharded(tmp_path)
    answer = told.answer(0)
    share_in(answer, 0, told.plan.source)
    DAMAGE[damage](answer.common, answer.own)
    with pytest.raises((ValueError, KeyError, TypeError)):
        share_in(answer, 0, told.plan.source)
