"""What a spare does before it is needed, so that it is not done while all others wait.

The ranks write the order in which gradients arrive into the agent's folder, once in an attempt. A spare lays out the
buckets of DDP by it. It takes memory from the kernel, too, for the first step: to touch 30 MB for the first time takes
5 ms and more, which the other ranks have behind them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from mindx_elastic.core.events import logger
from mindx_elastic.rejoin import groups

__all__ = ["grow_heap", "lay_out_buckets", "share_orders"]

_LARGEST_BLOCK = 24 << 20  # glibc's limit is 32 MiB
_FILE = "gradients.json"
_HEAP_BLOCK, _HEAP_BLOCKS = 512 << 10, 64


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


def grow_heap() -> None:
    """Let the C library keep freed memory of usual sizes, and have some of it."""
    block = torch.empty(_LARGEST_BLOCK, dtype=torch.uint8)
    del block  # when a large block is given back, glibc takes all up to its size from the heap, and keeps twice as much
    blocks = [torch.zeros(_HEAP_BLOCK, dtype=torch.uint8) for _ in range(_HEAP_BLOCKS)]
    del blocks
