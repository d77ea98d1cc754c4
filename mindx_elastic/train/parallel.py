"""Devices and ranks for `Model`: where the network lives, the process group, and DDP."""

from __future__ import annotations

import atexit
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.config import RankInfo
from mindx_elastic.errors import UsageError

__all__ = ["all_sum", "choose_device", "is_parallel", "join_process_group", "place", "without_ddp", "wrap_network"]


def choose_device(device: str | torch.device | None, network: nn.Module, ranks: RankInfo) -> torch.device:
    """`device` when given, else where the network is if not on the CPU, else this rank's GPU, else the CPU."""
    if device is not None:
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise UsageError(f"device={device!r}: {str(error).splitlines()[0]}") from None
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"device={device!r}, but this process sees no CUDA device; give device='cpu' or None")
        return chosen
    first = next(network.parameters(), None)
    if first is not None and first.device.type != "cpu":
        return first.device
    if torch.cuda.is_available():
        if ranks.local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"LOCAL_RANK={ranks.local_rank}, but this node shows {torch.cuda.device_count()} CUDA "
                "devices; start fewer processes per node, or pass device='cpu'"
            )
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu")


def place(network: nn.Module, device: torch.device, *, asked: bool) -> None:
    """Move the network, unless it is spread over devices or wrapped already and `asked` is False."""
    devices = {p.device for p in network.parameters()}
    if asked or (len(devices) <= 1 and not is_parallel(network)):
        network.to(device)


def join_process_group(device: torch.device, ranks: RankInfo) -> int:
    """The world size; initialises torch.distributed (gloo, with CUDA also NCCL) when torchrun's environment asks
    for it.

    A group that we made is destroyed at the exit of the interpreter and not at the end of a training: an evaluation
    or a second training may follow, and DDP keeps using it.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if ranks.world_size == 1:
        return 1
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    atexit.register(_leave_process_group)
    return dist.get_world_size()


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_parallel(network: nn.Module) -> bool:
    """Whether the network, or a part of it, is already distributed by DDP, FSDP or tensor parallelism."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    wrappers = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    if any(isinstance(module, wrappers) for module in network.modules()):
        return True
    return any(isinstance(parameter, DTensor) for parameter in network.parameters())


def wrap_network(network: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """`network` inside DDP when there are several ranks, it learns, and it is not distributed yet."""
    if world_size == 1 or is_parallel(network) or not any(p.requires_grad for p in network.parameters()):
        return network
    spread = len({p.device for p in network.parameters()}) > 1
    device_ids: list[Any] | None = [device] if device.type == "cuda" and not spread else None
    return DistributedDataParallel(network, device_ids=device_ids)


def without_ddp(network: nn.Module) -> nn.Module:
    """`network` out of DDP, still compiled or sharded where it is. DDP broadcasts buffers in each forward, also in
    evaluation, where the ranks may have different numbers of batches.
    """
    if isinstance(network, DistributedDataParallel):
        return network.module  # type: ignore[no-any-return]
    inner = getattr(network, "_orig_mod", None)  # torch.compile around DDP
    return inner.module if isinstance(inner, DistributedDataParallel) else network


def all_sum(value: Tensor) -> Tensor:
    """`value` added up over all ranks; `value` itself is not changed. A collective."""
    total = value.clone()
    dist.all_reduce(total)
    _await_release(total)
    return total


def _await_release(tensor: Tensor) -> None:
    """Wait until gloo's thread has let go of `tensor`.

    The thread drops its reference a moment after the collective has returned. If the Python object dies first, the
    thread needs the GIL for that, and when the interpreter is ending by then the process aborts ("terminate called
    without an active exception"; seen in a quarter of the runs that ended right after an evaluation, torch 2.13).
    """
    if tensor.device.type != "cpu" or not hasattr(tensor, "_use_count"):
        return
    end = time.monotonic() + 1.0
    while tensor._use_count() > 1 and time.monotonic() < end:
        time.sleep(0.0002)
