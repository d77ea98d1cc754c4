"""A rank without a file of its own takes that of a replica; its random numbers are new and always the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.config import RankInfo
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.start.loading import _how_to_restore_rng
from mindx_elastic.start.restore import Resumed
from tests.checkpoint_files import write_step
from tests.start.finding import find_and_read
from tests.start.shared_store import on_all_ranks

WORLD = 3
REPLICAS: dict[str, Any] = {"world_size": WORLD, "coordinates": {"replicas": WORLD}}


def find(directory: Path) -> list[Resumed]:
    """What every rank resumes from; raises the first rank's error."""
    found = on_all_ranks(
        WORLD,
        lambda rank, exchange: find_and_read(
            [directory], RankInfo(rank=rank, world_size=WORLD), exchange, resume="auto"
        ),
    )
    for one in found:
        if isinstance(one, Exception):
            raise one
    return [one for one in found if isinstance(one, Resumed)]


def lose(directory: Path, *ranks: int) -> None:
    for rank in ranks:
        for path in (directory / f"rank_{rank}").iterdir():
            path.unlink()


def numbers() -> tuple[list[float], float, float]:
    return torch.rand(4).tolist(), random.random(), float(np.random.rand())


def test_random_numbers_of_a_rank_with_a_donor_are_its_own_and_always_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_step(tmp_path, 7, **REPLICAS)
    lose(tmp_path, 0, 2)
    found = find(tmp_path)
    found[0].checkpoint.state["rng"] = found[2].checkpoint.state["rng"] = None  # the donor's are not looked at
    drawn = []
    for rank in (0, 2, 0):
        _how_to_restore_rng(found[rank], None, RankInfo(rank=rank, world_size=WORLD), Unmanaged("error"))()  # type: ignore[arg-type]
        drawn.append(numbers())
    assert drawn[0] == drawn[2] != drawn[1]
    assert "rank 2 has no file of step 7 and takes rank 1's" in caplog.text
