"""Which runs' memory counts: what the directory knows."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from mindx_elastic.core.events import EventLog, older_generation
from mindx_elastic.memory.known_runs import known_runs, leave_trace, marked_runs
from tests.memory.test_memory_files import WORLD, find, taken
from tests.start.arenas import RUN, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, WORLD)


def begin(machine: Machine, run: str = RUN, *, logged: bool = False) -> bool:
    """What a guard leaves behind at its start; returns whether the directory knows the run."""
    is_known = leave_trace(machine.directory, run, logged=logged)
    arena = machine.arena(0)
    arena.describe(machine.directory, run)
    arena.close()
    return is_known


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> list[str]:
    """No file can be made in the directory any more; what was tried."""
    refused: list[str] = []
    real = os.open

    def refuse(path: object, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(machine.directory)):
            refused.append(str(path))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    return refused


def test_a_marker_takes_the_place_of_the_log(machine: Machine) -> None:
    machine.snapshot(9)
    assert find(machine) == [None] * WORLD, "nobody knows the run"
    assert begin(machine)
    assert taken(find(machine)) == [(9, None, None)] * WORLD
    shutil.rmtree(machine.directory)
    machine.directory.mkdir()
    assert find(machine) == [None] * WORLD, "made again"
    assert begin(machine) and marked_runs(machine.directory) == {RUN}
    machine.know(RUN)
    assert begin(machine, logged=True)
    assert [path.name for path in machine.directory.iterdir()] == ["events.jsonl"], "the marker is gone"
    assert taken(find(machine)) == [(9, None, None)] * WORLD


def test_where_nothing_can_be_written_the_line_says_what_that_would_cost(
    machine: Machine, full: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    machine.snapshot(9)
    assert not begin(machine) and full
    assert find(machine) == [None] * WORLD and "Make room there" in caplog.text


def test_a_rotated_log_and_only_as_much_of_it_as_is_needed(machine: Machine) -> None:
    log = machine.directory / "events.jsonl"
    machine.know("older")
    os.rename(log, older_generation(log))
    for run in ("run-b", RUN):
        machine.know(run)
        for _ in range(3000):
            EventLog(log, run_id=run).emit("save", reason="x" * 100)
    assert known_runs([machine.directory]) == {"older", "run-b", RUN}
    assert known_runs([machine.directory], {RUN}) == {RUN}, "no more is read than it takes"
