"""A plan is encoded into answers and decoded on each rank: every rank gets its share; damaged answers are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.core.layout import Layout, parse_placement
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.inventory.inventory import Inventory
from mindx_elastic.plan.facts import FileFact, Refusal, ResumePlan, World
from mindx_elastic.resume.shares import Share, digest_of, share_in, tell_shares
from tests.checkpoint_files import write, write_step
from tests.inventory.looks import Carrier, look, sent
from tests.resume.worlds import Saved, target_of

MOMENT = ("run-a", 0, 7)


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
    return replace(fact, strategy=source, where="", base=None, fault_report=0, replica_digests={})


def rows(world_size: int) -> Layout:
    return Layout((world_size,), (parse_placement("S(0)"),))


def resharded(root: Path, verified: set[tuple[str, str]] | None = None) -> Told:
    """A step of 4 ranks on one disk, for 3 ranks."""
    if not any(root.iterdir()):
        Saved(4, {"w": (torch.arange(48.0).reshape(12, 4), rows(4))}).write(root)
    target = target_of(3, {"w": ((12, 4), rows(3))})
    return Told(inventory_of([root] * 3), World(3, target.own), verified)


def test_every_rank_reads_its_own_file(tmp_path: Path) -> None:
    write_step(tmp_path, 7)
    told = Told(inventory_of([tmp_path] * 2), World(2))
    for rank, share in enumerate(told.shares):
        file = as_sent(told.plan.ranks[rank].file, share.plan.source)
        assert share.rank == replace(told.plan.ranks[rank], file=file)
        assert (share.rank.donor, share.rank.assembled, share.plan.files) == (None, False, {rank: (file,)})
        assert (share.number, share.is_seen, share.sources, share.verify, share.uses_own_state) == (
            0,
            True,
            [],
            [],
            False,
        )
        assert (share.plan.moment, share.plan.ranks, share.plan.world) == (MOMENT, (), World(2))
        for name in ("epoch", "step_in_epoch", "resharded", "inexact", "steps_lost"):
            assert getattr(share.plan, name) == getattr(told.plan, name), name
    assert not told.asked, "whole files need nothing but the answer"


def test_the_target_is_that_of_the_rank(tmp_path: Path) -> None:
    write_step(tmp_path, 7)
    target = target_of(2, {"w": ((12, 4), rows(2))}).own
    assert Told(inventory_of([tmp_path] * 2), World(2)).share(1, target).plan.world == World(2, target)


def test_a_file_on_another_node_comes_with_its_sources(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for rank in range(2):
        write(nodes[0] / f"rank_{rank}" / "a-1_7.safetensors", step=7, rank=rank, world_size=2)
    nodes[1].mkdir()
    own, other = Told(inventory_of(nodes, transport=Carrier()), World(2)).shares
    assert (own.is_seen, own.sources) == (True, [])
    assert (other.is_seen, other.sources) == (False, [(0, (0, "rank_1/a-1_7.safetensors"))])


@pytest.mark.parametrize("with_state", [False, True])
def test_a_rank_without_a_file_gets_a_donor(tmp_path: Path, with_state: bool) -> None:
    write(tmp_path / "rank_0" / "a-1_7.safetensors", step=7, world_size=2, coordinates={"replicas": 2})
    inventory = inventory_of([tmp_path] * 2)
    if with_state:
        inventory.own_states[MOMENT] = {1}
    told = Told(inventory, World(2))
    assert [share.rank.donor for share in told.shares] == [None, 0]
    assert [share.uses_own_state for share in told.shares] == [False, with_state]
    assert [share.rank.file.path for share in told.shares] == [str(tmp_path / "rank_0" / "a-1_7.safetensors")] * 2
    assert told.share(1).plan.inexact == told.plan.inexact


def test_a_second_file_of_a_rank_and_step_has_its_number(tmp_path: Path) -> None:
    """Damage of a file is reported by old rank and number."""
    write_step(tmp_path, 7)
    write_step(tmp_path, 7, name="a_breakpoint.safetensors", kind="breakpoint")
    inventory = inventory_of([tmp_path] * 2)
    first = Told(inventory, World(2)).plan.files[1][0]
    assert Told(inventory, World(2)).share(1).number == 0
    inventory.forget(1, first, "damaged")
    told = Told(inventory, World(2))
    share = told.share(1)
    assert told.plan.files[1][share.number].path == share.rank.file.path != first.path


def test_assembled_ranks_ask_for_the_files_that_they_need(tmp_path: Path) -> None:
    told = resharded(tmp_path)
    share = told.share(2)
    assert (share.rank.assembled, share.rank.nbytes) == (True, told.plan.ranks[2].nbytes)
    assert share.plan.source.to_json() == told.plan.source.to_json() and told.asked == ["source"]
    assert list(share.plan.files) == [0, 1, 2, 3] and told.asked == ["source"], "listing them asks for none"
    for _ in range(2):
        assert share.plan.files[3] == tuple(as_sent(fact, share.plan.source) for fact in told.plan.files[3])
    assert told.asked == ["source", "file/3"], "each is asked for once"
    with pytest.raises(KeyError):
        share.plan.files[4]


def test_the_ranks_divide_the_verification(tmp_path: Path) -> None:
    verified: set[tuple[str, str]] = set()
    told = resharded(tmp_path, verified)
    checked = [fact.path for share in told.shares for fact, _ in share.verify]
    assert sorted(checked) == sorted(told.plan.used_paths()) == sorted(path for _, path in verified), (
        "each used file once"
    )
    assert all(share.verify for share in told.shares)
    for share in told.shares:
        for fact, number in share.verify:
            assert told.plan.files[fact.rank][number].path == fact.path
    assert not any(share.verify for share in resharded(tmp_path, verified).shares), "not again in the next round"


def test_both_sides_compute_the_same_digest(tmp_path: Path) -> None:
    told = resharded(tmp_path)
    assert told.merged.own is not None
    assert digest_of(told.answer(1).own) == digest_of(told.merged.own[1]) != digest_of(told.merged.own[0])


DAMAGE: dict[str, Callable[[Any, Any], object]] = {
    "no moment": lambda common, own: common.pop("moment"),
    "a short moment": lambda common, own: common["moment"].pop(),
    "a step that is a text": lambda common, own: common.update(moment=["run-a", 0, "seven"]),
    "a world without ranks": lambda common, own: common.update(size=0),
    "an epoch that is missing": lambda common, own: common.update(epoch=None),
    "no row": lambda common, own: own.pop("row"),
    "a short row": lambda common, own: own["row"].pop(),
    "a path that is a number": lambda common, own: own["row"].__setitem__(0, 7),
    "a kind that is a list": lambda common, own: own["row"].__setitem__(1, []),
    "an old rank that is a text": lambda common, own: own.update(old="0"),
    "an old rank below 0": lambda common, own: own.update(old=-1),
    "an old rank that did not exist": lambda common, own: own.update(old=4),
    "a source without a place": lambda common, own: own.update(sources=[[1]]),
    "a file to verify of no old rank": lambda common, own: own.update(verify=[[4, 0, own["row"]]]),
    "readers below 0": lambda common, own: own["row"].__setitem__(6, [[-1, 2]]),
    "ranks without end": lambda common, own: common.update(ranks=[[0, 10**15]]),
    "ranks backwards": lambda common, own: common.update(ranks=[[3, -2]]),
    "ranks that are no numbers": lambda common, own: common.update(ranks=[["0", 4]]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_answer_is_refused(tmp_path: Path, damage: str) -> None:
    told = resharded(tmp_path)
    answer = told.answer(0)
    share_in(answer, 0, None)
    DAMAGE[damage](answer.common, answer.own)
    with pytest.raises((ValueError, KeyError, TypeError)):
        share_in(answer, 0, None)


def test_a_damaged_list_of_files_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    told = resharded(tmp_path)
    share = told.share(0)
    told.merged.more["file/1"][0].pop()
    with pytest.raises(ValueError, match="unpack"):
        share.plan.files[1]
