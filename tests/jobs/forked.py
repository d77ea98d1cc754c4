"""Ranks without torchrun: forked from one process that has imported everything, since most of a short run is that."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress

__all__ = ["run_ranks"]


def _free_port() -> int:
    """Below those that the kernel gives away by itself: one of these may be taken before rank 0 listens on it."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_ranks(ranks: int, work: Callable[[], int]) -> int:
    """`work` in a child process a rank, with torchrun's variables; the worst of their exit codes."""
    import torch._dynamo  # noqa: F401 - what an optimizer's first step imports, once for all

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return work()
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(ranks)]
    return max(codes, key=abs)
