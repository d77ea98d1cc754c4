"""Updates with gradients that DDP has not reduced are named, whenever the program begins them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.ddp import ddp_modules
from mindx_elastic.guard.checks.ddp import UnreducedUpdates
from mindx_elastic.guard.unmanaged import Unmanaged

pytestmark = pytest.mark.usefixtures("one_rank_group")


class Job:
    """Two models in DDP, each with an optimizer, and what is told of their updates."""

    def __init__(self) -> None:
        self.first, self.second = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
        self.optimizers = {id(m): torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.first, self.second)}
        targets = {"first": self.first, "second": self.second}
        self.unmanaged = Unmanaged("error")
        self.steps, self.samples = 0, dict[str, int]()
        self.updates = UnreducedUpdates(ddp_modules(targets), self.unmanaged, self.samples)

    def forward(self, module: DistributedDataParallel, *, reduces: bool) -> torch.Tensor:
        with nullcontext() if reduces else module.no_sync():
            out: torch.Tensor = module(torch.ones(1, 2)).sum()
        return out

    def update(self, module: DistributedDataParallel) -> None:
        self.updates.at_update(self.optimizers[id(module)])

    def end_step(self) -> int:
        """Returns how many notes there are."""
        self.steps += 1
        self.updates.at_boundary(self.steps, closely=True)
        return len(self.unmanaged.notes)


@pytest.fixture
def job(one_rank_group: None) -> Job:
    return Job()


def under_no_sync(job: Job) -> None:
    job.forward(job.first, reduces=False).backward()


def reduced_in_the_end(job: Job) -> None:
    under_no_sync(job)
    job.forward(job.first, reduces=True).backward()


def averaged_by_hand(job: Job) -> None:
    under_no_sync(job)
    for parameter in job.first.parameters():
        dist.all_reduce(parameter.grad)


def with_a_forward_without_gradients(job: Job) -> None:
    job.forward(job.first, reduces=True).backward()
    with torch.no_grad():
        job.forward(job.first, reduces=False)


@pytest.mark.parametrize(
    ("backward", "is_told"),
    [
        (under_no_sync, True),
        (reduced_in_the_end, False),
        (averaged_by_hand, False),
        (with_a_forward_without_gradients, False),
    ],
)
def test_updates_that_nothing_has_reduced_are_told(job: Job, backward: Callable[[Job], None], is_told: bool) -> None:
    for _ in range(2):
        backward(job)
        job.update(job.first)
        assert job.end_step() == is_told
    assert all("DDP has not reduced (under no_sync())" in note for note in job.unmanaged.notes)


def test_samples_of_the_last_steps_say_whether_ranks_have_the_same_weights(job: Job) -> None:
    for _ in range(6):
        averaged_by_hand(job)
        job.update(job.first)
        job.end_step()
    assert [*job.samples] == ["weights_3", "weights_4", "weights_5", "weights_6"]
    assert len({*job.samples.values()}) == 1, "the weights have not moved"
    with torch.no_grad():
        job.first.module.weight[0, 0] += 1
    job.end_step()
    assert job.samples["weights_7"] != job.samples["weights_6"]


def test_the_update_of_another_model_is_not_meant(job: Job) -> None:
    """A GAN whose generator's loss goes through the critic, which is under no_sync() there."""
    job.forward(job.second, reduces=True).backward()
    job.forward(job.first, reduces=False).backward()
    job.update(job.second)
    assert job.end_step() == 0


def test_a_forward_that_reduces_by_itself_is_not_meant(one_rank_group: None) -> None:
    """Lightning's manual optimization: backward, reduction and update are inside of the forward, which switches DDP's
    own preparation of the next backward off once they are done."""

    class Trains(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x.clone())
            updates.at_update(optimizer)
            ddp.require_backward_grad_sync = False
            return super().forward(x)

    ddp = DistributedDataParallel(Trains(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    unmanaged = Unmanaged("error")
    updates = UnreducedUpdates(ddp_modules({"model": ddp}), unmanaged, {})
    for _ in range(3):
        ddp(torch.ones(1, 2))
        ddp.require_backward_grad_sync = True
        updates.at_boundary(1, closely=True)
    assert not unmanaged.notes
