"""Layouts that the user gives: parts of other sizes are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mindx_elastic.agreement.gather import meet
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.layouts import ByHand, ParallelSetup
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import Layout
from mindx_elastic.errors import UsageError
from mindx_elastic.start.job_layouts import JobLayouts, own_target
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
