"""Uninterrupted runs, made once a session for each way of training, and a folder of a test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness
from tests.system.nodes import End, end_of

Uninterrupted = Callable[..., harness.Job]
Reference = Callable[..., harness.Job]
Plain = Callable[..., End]


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """``uninterrupted(script, ranks, *args, **env)``: the finished run of a job with these arguments, in a directory of
    its own and without shared memory."""
    done: dict[tuple[object, ...], harness.Job] = {}

    def run(script: str, ranks: int, *args: object, **env: str) -> harness.Job:
        key = (script, ranks, args, tuple(sorted(env.items())))
        if key not in done:
            directory: Path = tmp_path_factory.mktemp("uninterrupted") / "job"
            directory.mkdir()
            done[key] = harness.run_job(script, directory, *args, ranks=ranks, env={"MINDX_ARENA_DIR": "none", **env})
        return done[key]

    return run


@pytest.fixture(scope="session")
def reference(uninterrupted: Uninterrupted) -> Reference:
    """``reference(ranks, *args)``: of ``loop.py``."""

    def run(ranks: int, *args: object) -> harness.Job:
        job = uninterrupted("loop.py", ranks, *args)
        assert len(job.hashes()) == ranks, job.report()
        return job

    return run


@pytest.fixture
def plain(uninterrupted: Uninterrupted) -> Plain:
    """``plain(ranks, *args)``: the end of the undisturbed run of ``in_place.py``, without an agent."""
    return lambda ranks, *args: end_of(uninterrupted("in_place.py", ranks, "--epochs", 2, *args))


@pytest.fixture
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the test's own, with a folder ``shm`` in it: default run directories lie there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shm").mkdir()
