"""Updates with gradients that DDP has not reduced are named, whenever the program begins them."""

from __future__ import annotations

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
        self.updates = UnreducedUpdates(ddp_modules(targets), self.unmanaged)

    def forward(self, module: DistributedDataParallel, *, reduces: bool) -> torch.Tensor:
        with nullcontext() if reduces else module.no_sync():
            out: torch.Tensor = module(torch.ones(1, 2)).sum()
        return out

    def update(self, module: DistributedDataParallel) -> None:
        self.updates.at_update(self.optimizers[id(module)])

    def end_step(self) -> int:
        """Returns how many notes there are."""
        self.updates.at_boundary()
        return len(self.unmanaged.notes)


@pytest.fixture
def job(one_rank_group: None) -> Job:
    return Job()


@pytest.mark.parametrize(("forwards", "is_told"), [((False, False), True), ((False, True), False), ((True,), False)])
def test_the_last_forward_in_front_of_an_update_counts(job: Job, forwards: tuple[bool, ...], is_told: bool) -> None:
    for reduces in forwards:
        job.forward(job.first, reduces=reduces).backward()
    job.update(job.first)
    assert job.end_step() == is_told
    assert all("DDP has not reduced (under no_sync())" in note for note in job.unmanaged.notes)


def test_gradients_that_the_program_averages_are_not_meant(job: Job) -> None:
    for _ in range(2):
        job.forward(job.first, reduces=False).backward()
        for parameter in job.first.parameters():
            dist.all_reduce(parameter.grad)
        job.update(job.first)
        assert job.end_step() == 0


def test_a_forward_without_gradients_says_nothing_of_the_next_update(job: Job) -> None:
    job.forward(job.first, reduces=True).backward()
    with torch.no_grad():
        job.forward(job.first, reduces=False)
    job.update(job.first)
    assert job.end_step() == 0


def test_the_update_of_another_model_is_not_meant(job: Job) -> None:
    """A GAN whose generator's loss goes through the critic, which is under no_sync() there."""
    job.forward(job.first, reduces=True).backward()
    job.update(job.first)
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
    updates = UnreducedUpdates(ddp_modules({"model": ddp}), unmanaged)
    for _ in range(3):
        ddp(torch.ones(1, 2))
        ddp.require_backward_grad_sync = True
        updates.at_boundary()
    assert not unmanaged.notes


def test_under_compile() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    model = torch.compile(ddp, backend="eager")
    unmanaged = Unmanaged("error")
    updates = UnreducedUpdates(ddp_modules({"model": model}), unmanaged)
    with ddp.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    updates.at_update(torch.optim.SGD(ddp.parameters(), lr=0.1))
    updates.at_boundary()
    assert len(unmanaged.notes) == 1
