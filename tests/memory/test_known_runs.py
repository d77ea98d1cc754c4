"""Which runs' memory counts: what the directory knows."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mindx_elastic.core.events import EventLog, older_generation
from mindx_elastic.memory.known_runs import known_runs
from tests.memory.test_memory_files import WORLD, find, taken
from tests.start.arenas import RUN, Machine


def test_memory_counts_as_long_as_the_directory_knows_its_run(tmp_path: Path) -> None:
    machine = Machine(tmp_path, WORLD)
    machine.snapshot(9)
    assert find(machine) == [None] * WORLD, "nobody knows the run"
    machine.know(RUN)
    assert taken(find(machine)) == [(9, None, None)] * WORLD
    shutil.rmtree(machine.directory)
    machine.directory.mkdir()
    assert find(machine) == [None] * WORLD, "made again"


def test_a_rotated_log_and_only_as_much_of_it_as_is_needed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, WORLD)
    log = machine.directory / "events.jsonl"
    machine.know("older")
    os.rename(log, older_generation(log))
    for run in ("run-b", RUN):
        machine.know(run)
        for _ in range(3000):
            EventLog(log, run_id=run).emit("save", reason="x" * 100)
    assert known_runs([machine.directory]) == {"older", "run-b", RUN}
    assert known_runs([machine.directory], {RUN}) == {RUN}, "no more is read than it takes"
