"""A failure that the program catches is seen all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from mindx_elastic.rejoin.failures import Failures, comes_from_failure


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


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_a_failed_backward(failures: Failures, how: str) -> None:
    x = torch.ones(2, requires_grad=True)
    loss = Fails.apply(x).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError):
        loss.backward() if how == "backward" else torch.autograd.grad(loss, x)
    assert failures.seen


def test_an_error_of_the_program_is_none(failures: Failures) -> None:
    with pytest.raises(ValueError, match="bad sample"):
        failures.module(torch.full((2,), 10.0))  # type: ignore[attr-defined]
    assert not failures.seen


def test_a_failed_collective(failures: Failures) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1, dtype=torch.uint16))
        assert failures.seen
    finally:
        dist.destroy_process_group()


def _made_of(first: BaseException, *more: type[Exception]) -> BaseException:
    error = first
    for kind in more:
        try:
            raise kind("made of it") from error
        except kind as made:
            error = made
    return error


def test_an_error_that_is_made_of_a_failure_comes_from_it() -> None:
    assert comes_from_failure(RuntimeError())
    assert comes_from_failure(_made_of(RuntimeError(), ValueError, KeyError))
    assert not comes_from_failure(_made_of(OSError(), ValueError))
    assert not comes_from_failure(None)


@pytest.fixture
def cut_off() -> Iterator[dist.ProcessGroup]:
    """A group of two ranks whose other one takes no part."""
    store, groups = dist.HashStore(), cast(Any, torch._C._distributed_c10d)

    def connect(rank: int) -> Any:
        group: Any = dist.ProcessGroup(store, rank, 2)
        backend = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(f"failures-{rank}")
        groups._register_process_group(f"failures-{rank}", group)
        return group

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(connect, range(2))
    yield one
    for rank in range(2):
        groups._unregister_process_group(f"failures-{rank}")
    del other


@pytest.mark.parametrize("use", [lambda x: x + 1, lambda x: x.wait(), functional.wait_tensor], ids=["+", "wait", "op"])
def test_a_functional_collective_that_fails(
    failures: Failures, cut_off: dist.ProcessGroup, use: Callable[[torch.Tensor], object]
) -> None:
    """It raises where its result is used first, and says nothing when it is used again."""
    result = functional.all_reduce(torch.ones(1), "sum", cut_off)
    assert not failures.seen
    with pytest.raises(RuntimeError):
        use(result)
    assert failures.seen


@pytest.mark.parametrize("asks", [True, False])
def test_a_collective_that_is_waited_for_or_only_asked(
    failures: Failures, cut_off: dist.ProcessGroup, asks: bool
) -> None:
    """``work = dist.all_reduce(x, async_op=True)``, and ``work.wait()`` in ``suppress(RuntimeError)``."""
    work = cut_off.allreduce([torch.ones(1)])
    assert not failures.seen
    while asks and not work.is_completed():
        assert not failures.seen
    with nullcontext() if asks else pytest.raises(RuntimeError):
        _ = asks or work.wait()
    assert failures.seen


def test_the_operator_is_found_as_before_and_is_as_before_afterwards() -> None:
    packet: Any = torch.ops._c10d_functional.wait_tensor
    before, hashed = (packet._op, packet.default._op), {packet.default: "known"}
    failures = Failures([])
    assert packet._op is not before[0] and hashed[packet.default] == "known"
    failures.close()
    assert packet._op is before[0] and packet.default._op is before[1]
