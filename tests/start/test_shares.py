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
from mindx_elastic.start.facts import FileFact, Refusal, ResumePlan, World
from mindx_elastic.start.inventory import Inventory
from mindx_elastic.start.shares import Share, share_in, tell_shares
from tests.checkpoint_files import write
from tests.start.looks import Carrier, look, sent
from tests.start.worlds import Saved, target_of


class Told:
    """The shares of a plan, as the ranks receive them: through JSON."""

    def __init__(self, inventory: Inventory, world: World, verified: set[tuple[str, str]] | None = None) -> None:
        plan = inventory.plan(world)
        assert not isinstance(plan, Refusal), plan
        self.plan: ResumePlan = plan
        self.merged: Merged = tell_shares(plan, inventory, set() if verified is None else verified)
        self.asked: list[str] = []

    def more(self, keys: Sequence[str]) -> list[Any]:
        self.asked += keys
        return [json.loads(json.dumps(self.merged.more[key])) for key in keys]

    def answer(self, rank: int) -> Answer:
        assert self.merged.own is not None
        common, own = json.loads(json.dumps([self.merged.common, self.merged.own[rank]]))
        return Answer(common, own, self.more)

    def share(self, rank: int, target: Strategy | None = None) -> Share:
        return share_in(self.answer(rank), rank, target)

    @property
    def shares(self) -> list[Share]:
        return [self.share(rank) for rank in range(self.plan.world.size)]


def inventory_of(places: Sequence[Path], **options: Any) -> Inventory:
    return Inventory.merge(sent(look(places, **options)))


def as_sent(fact: FileFact, source: Strategy) -> FileFact:
    """What a rank has to know of a file."""
    return FileFact(
        fact.path, fact.rank, fact.moment, fact.world_size, source, visible_to=fact.visible_to, held=fact.held
    )


def rows(world_size: int) -> Layout:
    return Layout((world_size,), (parse_placement("S(0)"),))


def resharded(root: Path, verified: set[tuple[str, str]] | None = None) -> Told:
    """A step of 4 ranks on one disk, for 3 ranks."""
    if not any(root.iterdir()):
        Saved(4, {"w": (torch.arange(48.0).reshape(12, 4), rows(4))}).write(root)
    target = target_of(3, {"w": ((12, 4), rows(3))})
    return Told(inventory_of([root] * 3), World(3, target.own), verified)


def test_a_file_on_another_node_comes_with_its_sources(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for rank in range(2):
        write(nodes[0] / f"rank_{rank}" / "a-1_7.safetensors", step=7, rank=rank, world_size=2)
    nodes[1].mkdir()
    own, other = Told(inventory_of(nodes, transport=Carrier()), World(2)).shares
    assert (own.is_seen, own.sources) == (True, [])
    assert (other.is_seen, other.sources) == (False, [(0, (0, "rank_1/a-1_7.safetensors"))])


def test_assembled_ranks_are_told_all_files(tmp_path: Path) -> None:
    told = resharded(tmp_path)
    share = told.share(2)
    assert share.rank.assembled and share.plan.source.to_json() == told.plan.source.to_json()
    assert list(share.plan.files) == [0, 1, 2, 3]
    assert share.plan.files[3] == tuple(as_sent(fact, share.plan.source) for fact in told.plan.files[3])


def test_the_ranks_divide_the_verification(tmp_path: Path) -> None:
    verified: set[tuple[str, str]] = set()
    told = resharded(tmp_path, verified)
    checked = [fact.path for share in told.shares for fact in share.verify]
    assert sorted(checked) == sorted(told.plan.used_paths()) == sorted(path for _, path in verified), (
        "each used file once"
    )
    assert all(share.verify for share in told.shares)
    for share in told.shares:
        for fact in share.verify:
            assert fact.path in [each.path for each in told.plan.files[fact.rank]]
    assert not any(share.verify for share in resharded(tmp_path, verified).shares), "not again in the next round"


DAMAGE: dict[str, Callable[[Any, Any], object]] = {
    "a short moment": lambda common, own: common["moment"].pop(),
    "a step that is a text": lambda common, own: common.update(moment=["run-a", 0, "seven"]),
    "a world without ranks": lambda common, own: common.update(size=0),
    "a short row": lambda common, own: own["file"].pop(),
    "a path that is a number": lambda common, own: own["file"].__setitem__(1, 7),
    "an old rank that did not exist": lambda common, own: own["file"].__setitem__(0, 4),
    "a source without a place": lambda common, own: own.update(sources=[[1]]),
    "a file to verify of no old rank": lambda common, own: own.update(verify=[[4, *own["file"][1:]]]),
    "readers without end": lambda common, own: own["file"].__setitem__(2, [[0, 10**15]]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_answer_is_refused(tmp_path: Path, damage: str) -> None:
    told = resharded(tmp_path)
    answer = told.answer(0)
    share_in(answer, 0, None)
    DAMAGE[damage](answer.common, answer.own)
    with pytest.raises((ValueError, KeyError, TypeError)):
        share_in(answer, 0, None)
