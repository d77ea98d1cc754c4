"""On which side of the code behind an epoch all ranks go on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from mindx_elastic.agreement.gather import Answer
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.copying import copy_tree, same_tree
from mindx_elastic.capture.loop_ends import front_of
from mindx_elastic.capture.weight_samples import HiddenChanges, WeightSamples
from mindx_elastic.core.position import Position
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.guard.loops.epoch_tail import EpochTail
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.memory.boundaries import OwnState
from mindx_elastic.persist.packer import StatePacker
from mindx_elastic.persist.reader import Checkpoint
from mindx_elastic.start.facts import ResumePlan, World
from mindx_elastic.start.restore import Resumed
from mindx_elastic.start.tail_side import TailSide
from tests.checkpoint_files import info_of

END = Position(3, 1, 3, 3)


class Rank:
    """A model with a buffer and a scheduler, at the last boundary of epoch 1."""

    def __init__(self) -> None:
        self.model = nn.BatchNorm1d(2)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.plan = torch.optim.lr_scheduler.StepLR(self.opt, 1, gamma=0.5)
        self.collector = Collector({"model": self.model, "optimizer": self.opt, "lr_scheduler": self.plan})
        self.opt.step()
        self.collector.loop = {"tail_values": {"train in job.py": {"": {"loss": {"value": 0.5, "device": "cpu"}}}}}
        self.collector.copy(END)

    def pass_tail(self, *, changes_weights: bool = False) -> None:
        tail = EpochTail(Loaders(None, None))
        tail.enter(
            self.collector,
            is_alone=False,
            hidden=HiddenChanges(WeightSamples(self.collector), lambda: None),
            after=lambda: self.collector.copy(END),
            keep_again=lambda is_foreseen: None,
        )
        tail.layer_waits = True
        tail.at_boundary(sys._getframe(), ends=True)
        assert self.model.running_mean is not None
        self.model.running_mean += 1
        self.model.eval()
        self.plan.step()
        torch.rand(3)
        if changes_weights:
            with torch.no_grad():
                self.model.weight.mul_(2)
        tail.pass_tail(1)

    def own(self) -> OwnState:
        return OwnState(StatePacker("plain", frozen="rng").pack(self.collector.volatile()), forecast=False)

    def found(self, own: OwnState | None = None) -> Resumed:
        info = info_of(3, world_size=2, kind="final")
        world = Strategy(2, ())
        plan = ResumePlan(info.moment, 1, 3, world, World(2, None), (), {}, resharded=False)
        checkpoint = Checkpoint(info, self.collector.state(), {})
        return Resumed(Path("f"), checkpoint, plan, donor=None if own is None else 0, own=own)


def meet(sides: Sequence[TailSide]) -> None:
    merged = sides[0].merge([side.say() for side in sides])
    for side in sides:
        side.hear(Answer(merged.common, None, lambda keys: []))


def test_behind_it_all_of_the_small_state_in_front_is_kept_and_comes_back() -> None:
    torch.manual_seed(0)
    behind, front = Rank(), Rank()
    before = copy_tree(front.collector.state())
    behind.pass_tail()
    assert not same_tree(behind.collector.state(), before)
    sides = [TailSide(behind.found()), TailSide(front.found())]
    meet(sides)
    for side, rank in zip(sides, (behind, front), strict=True):
        assert same_tree(side.state(rank.collector), before)


def test_the_small_state_of_a_killed_rank_decides_and_not_its_donors() -> None:
    donor, killed = Rank(), Rank()
    own = killed.own()
    donor.pass_tail()
    sides = [TailSide(donor.found()), TailSide(donor.found(own))]
    meet(sides)
    assert front_of(sides[0].state(donor.collector)["progress"]["loop"]) is None
    state, is_whole = sides[1].own()
    assert state is not None and is_whole and state["progress"]["loop"]["tail_values"]


def test_weights_that_it_has_changed_cannot_go_back(caplog: pytest.LogCaptureFixture) -> None:
    donor, killed = Rank(), Rank()
    own = killed.own()
    donor.pass_tail(changes_weights=True)
    sides = [TailSide(donor.found()), TailSide(donor.found(own))]
    meet(sides)
    assert front_of(sides[0].state(donor.collector)["progress"]["loop"]) is not None
    state, is_whole = sides[1].own()
    assert state is not None and not is_whole and not {"progress", "plain", "groups"} & state.keys()
    unmanaged = Unmanaged("warn")
    for side, rank in zip(sides, (donor, killed), strict=True):
        side.tell(rank.collector, unmanaged, leads=True)
    assert "has changed weights on rank 0" in caplog.text and "rank 1 had not finished it" in caplog.text
    assert len(unmanaged.notes) == 1
