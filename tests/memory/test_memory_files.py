"""What a start may use of shared memory, and what it takes from there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.core.events import EventLog, older_generation
from mindx_elastic.errors import NoUsableCheckpointError
from mindx_elastic.memory.memory_files import (
    RING_COPY,
    known_runs,
    own_states,
    small_records,
    snapshot_files,
)
from mindx_elastic.persist.catalog import read_entry
from mindx_elastic.start.restore import PlanPart, Resumed
from tests.checkpoint_files import flip_bit_in_data, write_step
from tests.start.arenas import RUN, Machine
from tests.start.finding import plans_on

WORLD = 3
REPLICAS: dict[str, Any] = {"world_size": WORLD, "coordinates": {"replicas": WORLD}}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, WORLD)


def find(machine: Machine, resume: str = "auto", arenas: bool = True) -> list[Resumed | None]:
    """What every rank resumes from; raises the first rank's error."""
    return [one.resumed for one in plans(machine, resume, arenas)]


def plans(machine: Machine, resume: str = "auto", arenas: bool = True) -> list[PlanPart]:
    return plans_on(machine.world_size, machine.directory, resume=resume, arenas=machine.job if arenas else None)


def taken(found: list[Resumed | None]) -> list[tuple[int, int | None, int | None]]:
    """Of each rank: the step, whose file it is if not its own, and the step of its own small state."""
    result = []
    for one in found:
        assert one is not None
        own = None if one.own is None else one.own.unpack()["rng"]["step"]
        result.append((one.checkpoint.info.step, one.donor, own))
    return result


# --- which runs the directory knows ---


def test_runs_of_the_event_logs(machine: Machine, tmp_path: Path) -> None:
    assert known_runs([machine.directory]) == set()
    machine.know("run-a", "run-b", "run-a", "")
    with open(machine.directory / "events.jsonl", "ab") as file:
        file.write(json.dumps({"event": "x", "reason": 'a "run_id": "quoted" in a text'}).encode() + b"\n")
        file.write(b'{"half a line\n\xff\xfe\n{"run_id": "run-c", "cut of')
    assert known_runs([tmp_path / "nothing", machine.directory]) == {"run-a", "run-b", "run-c"}


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


def test_what_others_have_planted_is_not_looked_at(machine: Machine, tmp_path: Path) -> None:
    machine.snapshot(4)
    (machine.job / "rank_0").rename(tmp_path / "elsewhere")
    (machine.job / "rank_0").symlink_to(tmp_path / "elsewhere")
    (slot,) = machine.slots(1)
    slot.rename(slot.with_name("moved"))
    slot.symlink_to(slot.with_name("moved"))
    (machine.job / "rank_x").mkdir()
    entries = [read_entry(path) for path in snapshot_files(machine.job)]
    assert [entry.info.rank for entry in entries if entry is not None and entry.info is not None] == [2]
    assert snapshot_files(machine.base / "nothing") == []


# --- rings ---


def test_a_boundary_goes_before_a_forecast_and_trust_is_told(machine: Machine) -> None:
    machine.boundary(1, 6)
    machine.boundary(1, 7, forecast=True)
    machine.boundary(1, 7)
    machine.boundary(1, 8, forecast=True, trusted=False)
    ring = machine.job / "rank_1" / "boundaries"
    found = own_states(ring)
    assert {moment[2]: (own.forecast, own.trusted) for moment, own in found.items()} == {
        6: (False, True),
        7: (False, True),
        8: (True, False),
    }
    assert [record.moment[2] for record in small_records(ring) if record.moment[2] == 8] == []
    assert small_records(ring, confirmed=(RUN, 0, 8))[0].moment == (RUN, 0, 8)
    machine.boundary(1, 8, forecast=True)
    assert own_states(ring)[RUN, 0, 8].trusted


def test_no_ring_is_no_trouble_and_one_that_cannot_be_read_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert own_states(tmp_path / "nothing") == {} and not caplog.text
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert own_states(tmp_path / "link") == {}
    assert "link cannot be read" in caplog.text


# --- what is taken ---


def test_a_step_that_only_some_ranks_have_is_named(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.know(RUN)
    machine.snapshot(1, ranks=[0, 2])
    assert find(machine) == [None] * WORLD
    assert "the job starts over; what it left in memory is not used" in caplog.text
    assert "step 1 is not used: rank 1 has no file of it" in caplog.text


def test_a_snapshot_never_hides_that_the_checkpoints_are_bad(machine: Machine) -> None:
    machine.know(RUN)
    machine.snapshot(1, ranks=[0])
    write_step(machine.directory, 5, world_size=WORLD)
    flip_bit_in_data(next((machine.directory / "rank_2").iterdir()))
    with pytest.raises(NoUsableCheckpointError):
        find(machine)


# --- a replica's file and the rank's own small state ---


def lose(machine: Machine, step: int, rank: int) -> None:
    for path in (machine.directory / f"rank_{rank}").glob(f"*_{step}.safetensors"):
        path.unlink()


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("forecast", [False, True])
def test_the_own_state_goes_with_a_replicas_file(machine: Machine, on_disk: bool, forecast: bool) -> None:
    """`on_disk`: the holder has brought the ring there, the machine is another one."""
    machine.know(RUN)
    for step in (5, 7):
        write_step(machine.directory, step, **REPLICAS)
    lose(machine, 7, 1)
    machine.boundary(1, 6)
    machine.boundary(1, 7, forecast=forecast)
    if on_disk:
        os.rename(machine.job / "rank_1" / "boundaries", machine.directory / "rank_1" / RING_COPY)
    found = find(machine)
    assert taken(found) == [(7, None, None), (7, 0, 7), (7, None, None)]
    assert found[1] is not None and found[1].own is not None
    assert found[1].own.forecast is forecast and found[1].own.unpack()["rng"]["of"] == 1


@pytest.mark.parametrize(
    "record", [{"step": 6}, {"trusted": False, "forecast": True}, {"run": "other"}, {"attempt": 1}]
)
def test_only_the_very_same_moment_is_its_own(machine: Machine, record: dict[str, Any]) -> None:
    """The exact step just before is better than one without the rank's own state."""
    machine.know(RUN)
    for step in (5, 7):
        write_step(machine.directory, step, **REPLICAS)
    lose(machine, 7, 1)
    machine.boundary(1, **{"step": 7, **record})
    assert taken(find(machine))[1] == (5, None, None)


def test_the_next_attempt_is_above_all_that_memory_has_seen(machine: Machine) -> None:
    machine.know(RUN)
    write_step(machine.directory, 7, world_size=WORLD)
    machine.snapshot(6, attempt=0)
    machine.boundary(2, 3, attempt=4)
    found = plans(machine)
    assert taken([one.resumed for one in found]) == [(7, None, None)] * WORLD
    assert {one.attempt for one in found} == {5}
