"""Recovery in place over NCCL, with stand-ins for torch's classes; on a real GPU: ``system/test_gpu.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.rejoin import nccl
from mindx_elastic.rejoin.member import LeavesToRejoin


class Options:
    def __init__(self) -> None:
        self.is_high_priority_stream, self.config = False, "usual"
        self._timeout = timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class FakeNccl:
    """In place of `ProcessGroupNCCL`."""

    Options = Options

    def __init__(self, store: Any = None, position: int = 0, size: int = 1, options: Any = None) -> None:
        self.store, self.position, self.size, self.options = store, position, size, options or Options()
        self.connected: list[torch.device] = []
        self.num_aborts = 0
        self.at_abort: Callable[[], object] = lambda: None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def abort(self) -> None:
        self.num_aborts += 1
        self.at_abort()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device that works, and what was asked of it."""
    found = SimpleNamespace(num_waits=0, error=None)

    def synchronize() -> None:
        found.num_waits += 1
        if found.error is not None:
            raise found.error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C._distributed_c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    return found


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch, cuda: SimpleNamespace) -> None:
    monkeypatch.setenv("MINDX_REJOIN_NCCL", "1")
    monkeypatch.setenv(nccl.ERROR_HANDLING, "0")


# --- whether it is done at all ---


def test_it_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch, cuda: SimpleNamespace) -> None:
    monkeypatch.delenv("MINDX_REJOIN_NCCL", raising=False)
    assert "MINDX_REJOIN_NCCL=1, which has been run on a single GPU only" in nccl.problem(["cuda"])


@pytest.mark.usefixtures("switched_on")
def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl.problem(["cuda"]) == ""
    assert nccl.problem(["cuda", "xpu"]) == "nccl is the backend of xpu"
    monkeypatch.setenv(nccl.ERROR_HANDLING, "1")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING is not 0" in nccl.problem(["cuda"])
    monkeypatch.setattr(torch._C._distributed_c10d, "ProcessGroupNCCL", object())
    assert "lacks abort, eager_connect_single_device, Options of ProcessGroupNCCL" in nccl.problem(["cuda"])
    monkeypatch.delattr(torch._C._distributed_c10d, "ProcessGroupNCCL")
    assert "of ProcessGroupNCCL" in nccl.problem(["cuda"])


# --- out of the collectives ---


def devices_of(*backends: Any) -> nccl.Devices:
    devices = nccl.Devices(lambda: list(backends))
    devices.look()
    return devices


def test_all_communicators_are_aborted_at_the_same_moment() -> None:
    """The abort of one may wait for the kernel of another."""
    together = threading.Barrier(3)
    backends = [FakeNccl() for _ in range(3)]
    for backend in backends:
        backend.at_abort = lambda: together.wait(30.0)
    devices = devices_of(*backends)
    devices.abort()
    devices.abort()
    assert devices.wait_aborted(60.0) == ""
    assert [backend.num_aborts for backend in backends] == [1, 1, 1], "once each"


def test_an_abort_that_does_not_return_is_the_reason_of_a_restart() -> None:
    backend, go = FakeNccl(), threading.Event()
    backend.at_abort = lambda: go.wait(60.0)
    devices = devices_of(backend)
    devices.abort()  # returns at once: the watcher has more to do
    assert devices.wait_aborted(0.01) == "a communicator could not be aborted within 0.01 s"
    go.set()
    assert devices.wait_aborted(60.0) == ""


# --- no wrong result in the weights ---


def test_an_abort_while_the_device_is_waited_for_is_seen(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends because its communicator is aborted. With new connections it begins anew."""
    backend = FakeNccl()
    devices = devices_of(backend)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", devices.abort)
        assert not devices.fence()
    devices.connected()
    assert devices.fence()
    devices.abort()
    devices.wait_aborted()
    assert backend.num_aborts == 2


def test_an_update_does_not_begin_and_its_gate_stays_clean() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gate = UpdateGate()
    gate.watch(list(model.parameters()))

    def leave() -> None:
        raise LeavesToRejoin

    try:
        before = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        gate.before_update = leave
        with pytest.raises(LeavesToRejoin):
            optimizer.step()
        states = [gate.state]
        assert torch.equal(model.weight, before)
        with gate.hold(0.0) as problem:
            assert problem is None, "the rank can be a donor"
        gate.before_update = None
        optimizer.step()
        assert [*states, gate.state] == [GateState.CLEAN, GateState.DIRTY]
    finally:
        gate.unwatch()


# --- new connections ---


@pytest.mark.parametrize("is_world", [True, False])
@pytest.mark.usefixtures("cuda")
def test_a_new_backend_is_connected_and_has_the_options_of_the_old_one(is_world: bool) -> None:
    old, timeout = FakeNccl(), timedelta(seconds=77)
    old.options.is_high_priority_stream, old.options.config = True, "own"
    new = nccl.new_backend(dist.HashStore(), 1, (4, 7), "mesh_dp", old, timeout, is_world=is_world)
    assert (new.position, new.size, new.connected) == (1, 2, [torch.device("cuda", 3)])
    options = new.options
    assert options is not old.options
    assert (options.is_high_priority_stream, options.config, options._timeout) == (True, "own", timeout)
    assert (options.group_name, options.global_ranks_in_group) == ("mesh_dp", [] if is_world else [4, 7])
