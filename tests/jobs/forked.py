"""Ranks without torchrun: forked from one process that has imported everything, since most of a short run is that."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

__all__ = ["run_ranks"]


def run_ranks(ranks: int, work: Callable[[], int]) -> int:
    """`work` in a child process a rank, with torchrun's variables; the worst of their exit codes."""
    import torch._dynamo  # noqa: F401 - what an optimizer's first step imports, once for all

    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])  # in no variable: it is another one each time
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return work()
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(ranks)]
    return max(codes, key=abs)
