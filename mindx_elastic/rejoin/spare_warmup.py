"""What a spare does before it is needed, so that it is not done while all others wait.

The ranks write the order in which gradients arrive into the agent's folder, once in an attempt. A spare lays out the
buckets of DDP by it. And it lets torch set up what the first step of a process sets up.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from mindx_elastic.core.events import logger
from mindx_elastic.rejoin import groups

__all__ = ["lay_out_buckets", "share_orders", "start_kernels"]

_FILE = "gradients.json"


def share_orders(folder: Path, attempt: str, orders: Mapping[str, list[int]]) -> None:
    """For the spares of this node that are forked from now on. `attempt`: as of `lay_out_buckets`."""
    path = folder / _FILE
    temp = path.with_suffix(f".{os.getpid()}")
    try:
        temp.write_text(json.dumps([attempt, {name: list(order) for name, order in orders.items()}]))
        temp.replace(path)
    except OSError as error:  # then they are laid out when the rank is known
        logger.debug("%s: %s", path, error)


def lay_out_buckets(ddp: groups.DdpModules, folder: Path, attempt: str) -> dict[str, list[int]]:
    """In a spare: lay out the buckets as the ranks of the attempt have. Returns the order of each module of which that
    has been done, for good: torch does it once."""
    with suppress(OSError, ValueError):
        known, orders = json.loads((folder / _FILE).read_text())
        if known == attempt and orders.keys() == {name for name, _ in ddp}:
            return {
                name: orders[name] for name, module in ddp if not groups.rebuild_buckets(name, module, orders[name])
            }
    return {}


def start_kernels() -> threading.Thread:
    """Have torch set up what the first forward and backward of a process set up (oneDNN, autograd), in a thread.

    Nothing of the program takes part and nothing of it changes: the tensors are zeros, so that no number is drawn, no
    module is called, and a new thread has none of the main thread's modes (autocast, function and dispatch
    modes, hooks of saved tensors, a default device).
    """
    thread = threading.Thread(target=_use_kernels, name="mindx-ahead", daemon=True)
    thread.start()
    return thread


def _use_kernels() -> None:
    """Forward and backward of what most networks have; not by `torch.nn`, whose functions may be replaced."""

    def zeros(*shape: int, trained: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu", requires_grad=trained)

    aten = torch.ops.aten
    scale = zeros(4, trained=True)
    x = aten.convolution(
        zeros(2, 3, 8, 8), zeros(4, 3, 3, 3, trained=True), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    x = aten.native_batch_norm(x, scale, scale, zeros(4), zeros(4), True, 0.1, 1e-5)[0]
    x = aten.linear(aten.relu(x).mean((2, 3)), zeros(2, 4, trained=True))
    torch.autograd.backward(aten.cross_entropy_loss(x, zeros(2, dtype=torch.int64)))
