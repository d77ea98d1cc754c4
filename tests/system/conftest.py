"""Uninterrupted runs, made once a session for each way of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness

Reference = Callable[..., harness.Job]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """``reference(ranks, *args)``: the finished uninterrupted run of ``loop.py`` with these arguments."""
    done: dict[tuple[object, ...], harness.Job] = {}

    def run(ranks: int, *args: object) -> harness.Job:
        key = (ranks, *args)
        if key not in done:
            directory: Path = tmp_path_factory.mktemp("reference")
            env = {"MINDX_ARENA_DIR": "none"}
            done[key] = harness.run_job("loop.py", directory, *args, ranks=ranks, env=env)
            assert len(done[key].hashes()) == ranks
        return done[key]

    return run
