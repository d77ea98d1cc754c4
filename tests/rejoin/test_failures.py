"""A failure that the program catches is seen all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mindx_elastic.rejoin.failures import Failures


class Wrapped(nn.Module):
    """Stands for DDP, whose forward may fail in a broadcast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise RuntimeError("Connection closed by peer")
        if x.sum() > 10:
            raise ValueError("a bad sample")
        return x


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def failures() -> Iterator[Failures]:
    module = Wrapped()
    found = Failures([module])
    found.module = module  # type: ignore[attr-defined]
    yield found
    found.close()


def test_nothing_is_seen_where_nothing_fails(failures: Failures) -> None:
    x = torch.ones(2, requires_grad=True)
    failures.module(x).sum().backward()  # type: ignore[attr-defined]
    torch.autograd.grad((x * x).sum(), x)
    assert not failures.seen


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_a_failed_backward(failures: Failures, how: str) -> None:
    x = torch.ones(2, requires_grad=True)
    loss = Fails.apply(x).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError):
        loss.backward() if how == "backward" else torch.autograd.grad(loss, x)
    assert failures.seen


def test_a_failed_forward(failures: Failures) -> None:
    with pytest.raises(RuntimeError):
        failures.module(-torch.ones(2))  # type: ignore[attr-defined]
    assert failures.seen


def test_an_error_of_the_program_is_none(failures: Failures) -> None:
    with pytest.raises(ValueError, match="bad sample"):
        failures.module(torch.full((2,), 10.0))  # type: ignore[attr-defined]
    assert not failures.seen


def test_torch_is_as_before_afterwards() -> None:
    before = torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward
    failures = Failures([])
    assert torch.autograd._engine_run_backward is not before[0]
    failures.close()
    assert (torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward) == before


def test_a_failed_collective(failures: Failures) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1, dtype=torch.uint16))
        assert failures.seen
    finally:
        dist.destroy_process_group()
