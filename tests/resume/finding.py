"""`find_and_read` on one rank, and on several at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import LocalExchange
from mindx_elastic.config import RankInfo
from mindx_elastic.resume.restore import Resumed, find_and_read
from tests.resume.shared_store import on_all_ranks

__all__ = ["find", "find_on", "step_of"]


def find(directory: Path, *more: Path, resume: Any = "auto") -> Resumed | None:
    return find_and_read([directory, *more], RankInfo(), LocalExchange(), resume=resume)


def step_of(found: Resumed | None) -> int:
    assert found is not None
    return found.checkpoint.info.step


def find_on(world_size: int, directory: Path, resume: Any = "auto") -> Sequence[Resumed | Exception | None]:
    return on_all_ranks(
        world_size,
        lambda rank, exchange: find_and_read(
            [directory], RankInfo(rank=rank, world_size=world_size), exchange, resume=resume
        ),
    )
