"""What the ranks tell each other of their tensors: sizes that do not fit, and what some of them hold alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.agreement.gather import meet
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.layouts import ByHand, ParallelSetup
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import Layout
from mindx_elastic.errors import UsageError
from mindx_elastic.persist.writer import write_checkpoint
from mindx_elastic.start.facts import Refusal, World
from mindx_elastic.start.job_layouts import JobLayouts, own_target
from tests.checkpoint_files import info_of
from tests.start.looks import look_alone
from tests.start.shared_store import on_all_ranks
from tests.start.strategies import rows


class Part(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(shape))


def targets(layout: Layout, shapes: list[tuple[int, ...]]) -> list[Any]:
    def describe(rank: int, exchange: Any) -> Any:
        ranks = RankInfo(rank=rank, world_size=len(shapes))
        collector = Collector({"model": Part(shapes[rank])})
        collector.set_parallel_setup(ParallelSetup(rank, len(shapes), (), ByHand({"model.*": layout}, ranks)))
        layouts = JobLayouts(exchange, own_target(collector, ranks), collector.layouts.set_job_layouts)
        meet(exchange, "plan", [layouts])
        return layouts.target.own if rank else layouts.target.strategy

    return on_all_ranks(len(shapes), describe)


def test_parts_of_other_sizes_are_refused_on_all_ranks() -> None:
    for error in targets(rows(4), [(3, 2), (3, 2), (3, 2), (1, 2)]):
        assert isinstance(
            error, UsageError
        ) and "model.experts: the ranks' parts make tensors of [12, 2] and [4, 2]" in str(error)
    assert all(target.tensors[0].shape == (12, 2) for target in targets(rows(4), [(3, 2)] * 4))


def write_files(root: Path, holders: set[int], world_size: int = 3) -> list[Any]:
    """Of DDP ranks, of which these also have an average."""

    def save(rank: int, exchange: Any) -> None:
        parts = {"model": Part((2, 2)), **({"ema": Part((2, 2))} if rank in holders else {})}
        collector = Collector(parts)
        collector.set_parallel_setup(ParallelSetup(rank, world_size, range(world_size)))
        target = own_target(collector, RankInfo(rank=rank, world_size=world_size))
        meet(exchange, "plan", [JobLayouts(exchange, target, collector.layouts.set_job_layouts)])
        path = root / f"rank_{rank}" / "job-1_7.safetensors"
        path.parent.mkdir(parents=True)
        state = {name: dict(part.state_dict()) for name, part in parts.items()}
        write_checkpoint(path, state, info_of(7, world_size=world_size, rank=rank), layout=collector.layout())

    return on_all_ranks(world_size, save)


@pytest.mark.parametrize(("holders", "lost"), [({0}, 0), ({0, 2}, 0), ({0, 1, 2}, 0), ({0}, 1), ({2}, 2)])
def test_what_some_ranks_hold_alone_is_known_by_the_files_of_the_others(
    tmp_path: Path, holders: set[int], lost: int
) -> None:
    """Layouts say that DDP's ranks hold the same, so a plan without the program took a step that no start can load."""
    assert write_files(tmp_path, holders) == [None] * 3
    assert not isinstance(look_alone(tmp_path).plan(World(3)), Refusal)
    (tmp_path / f"rank_{lost}" / "job-1_7.safetensors").unlink()
    plan = look_alone(tmp_path).plan(World(3))
    assert isinstance(plan, Refusal) == (holders == {lost}), str(plan)
    if isinstance(plan, Refusal):
        assert f"ema.experts: no usable file of rank {lost}, which held it" in str(plan)
    else:
        assert plan.ranks[lost].donor in (holders - {lost} if lost in holders else {0, 1, 2} - holders)
    fewer = look_alone(tmp_path).plan(World(2))
    assert isinstance(fewer, Refusal) or not any(share.assembled for share in fewer.ranks), "any file will do"


def test_the_file_of_a_rank_that_holds_more_is_taken_whole(tmp_path: Path) -> None:
    """As parts it would come without its parameters' names, and no dying save would do for the platform."""
    assert write_files(tmp_path, {0}, 2) == [None] * 2
    (tmp_path / "rank_1" / "job-1_7.safetensors").unlink()
    plan = look_alone(tmp_path).plan(World(2))
    assert not isinstance(plan, Refusal)
    assert plan.ranks[1].donor == 0 and not plan.ranks[1].assembled
    assert plan.source.replica_groups() == [(0, 1)]
