"""Which runs' memory counts: what the directory knows, and one that could leave no trace there."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from mindx_elastic.agent.holder import flush
from mindx_elastic.core.events import EventLog, lines_backwards, older_generation
from mindx_elastic.memory.known_runs import Claim, claim_of, known_runs, leave_trace, marked_runs, usable_runs
from tests.checkpoint_files import EPOCH_0, write_step
from tests.memory.test_memory_files import WORLD, find, taken
from tests.resume.arenas import RUN, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, WORLD)


def begin(machine: Machine, run: str = RUN, *, logged: bool = False) -> str:
    """What a guard leaves behind at its start; returns which trace."""
    trace = leave_trace(machine.directory, run, logged=logged)
    arena = machine.arena(0)
    arena.describe(machine.directory, run, trace)
    arena.close()
    return str(trace["trace"])


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


@pytest.mark.parametrize(
    ("known", "claims", "usable"),
    [
        ({}, [], set()),
        ({"a": 5.0, "": 6.0}, [], {"a"}),
        ({}, [Claim("c", 5.0)], {"c"}),
        ({"a": 4.0}, [Claim("c", 5.0)], {"a", "c"}),
        ({"a": 6.0}, [Claim("c", 5.0)], {"a"}),  # another run has lived since
        ({"a": 4.0}, [Claim("old", 3.0), Claim("c", 5.0)], {"a", "c"}),
        ({"a": 4.0, "c": 9.0}, [Claim("c", 5.0)], {"a", "c"}),
        ({}, [Claim("", 5.0)], set()),
    ],
)
def test_the_rule(known: dict[str, float], claims: list[Claim], usable: set[str]) -> None:
    assert usable_runs(known, claims) == usable


def test_a_marker_takes_the_place_of_the_log(machine: Machine) -> None:
    machine.snapshot(9)
    assert find(machine) == [None] * WORLD, "nobody knows the run"
    assert begin(machine) == "marker"
    assert taken(find(machine)) == [(9, None, None)] * WORLD
    shutil.rmtree(machine.directory)
    machine.directory.mkdir()
    assert find(machine) == [None] * WORLD, "made anew"
    assert begin(machine) == "marker" and marked_runs(machine.directory).keys() == {RUN}
    machine.know(RUN)
    assert begin(machine, logged=True) == "log"
    assert [path.name for path in machine.directory.iterdir()] == ["events.jsonl"], "the marker is gone"
    assert taken(find(machine)) == [(9, None, None)] * WORLD


@pytest.mark.parametrize("run", ["../x", "a/b", "ä \n.", "%2F"])
def test_a_marker_of_any_run(machine: Machine, run: str) -> None:
    assert begin(machine, run) == "marker" and marked_runs(machine.directory).keys() == {run}


def test_where_nothing_can_be_written_memory_speaks_for_itself(machine: Machine, full: list[str]) -> None:
    machine.snapshot(9)
    assert begin(machine) == "none" and full
    assert taken(find(machine)) == [(9, None, None)] * WORLD


def test_a_directory_that_was_made_anew_gets_nothing_of_it(
    machine: Machine, full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.snapshot(9)
    assert begin(machine) == "none" and claim_of(machine.job, machine.directory) is not None
    machine.directory.rename(machine.directory.with_name("old"))
    machine.directory.mkdir()
    assert claim_of(machine.job, machine.directory) is None
    assert find(machine) == [None] * WORLD


def test_an_older_run_claims_nothing_once_another_one_has_lived(
    machine: Machine, full: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine had no part in the newer run: the directory knows that one, and it is the one to go on with."""
    machine.snapshot(9)
    assert begin(machine) == "none"
    claim = claim_of(machine.job, machine.directory)
    assert claim is not None and full
    monkeypatch.undo()
    write_step(machine.directory, 3, world_size=WORLD, run_id="newer", created=claim.began + 1)
    assert {step for step, _, _ in taken(find(machine))} == {3}


def test_a_run_is_known_by_its_files(machine: Machine) -> None:
    machine.snapshot(9)
    write_step(machine.directory, 4, world_size=WORLD)
    assert not (machine.directory / "events.jsonl").exists()
    assert taken(find(machine)) == [(9, None, None)] * WORLD


def test_the_holder_keeps_to_the_same_rule(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.snapshot(9)
    arena = machine.arena(0)
    arena.describe(machine.directory, RUN)
    arena.close()
    assert "does not know the run" in " ".join(flush(machine.job).lines)
    assert begin(machine) == "marker"
    flushed = flush(machine.job)
    assert flushed.step == 9, flushed.lines


def test_a_rotated_log_and_only_as_much_of_it_as_is_needed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    log = machine.directory / "events.jsonl"
    machine.know("older")
    os.rename(log, older_generation(log))
    for run in ("run-b", RUN):
        machine.know(run)
        for _ in range(3000):
            EventLog(log, run_id=run).emit("save", reason="x" * 100)
    assert known_runs([machine.directory]).keys() == {"older", "run-b", RUN}
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, count: int, offset: int) -> bytes:
        read.append(count)
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert known_runs([machine.directory], {RUN}).keys() == {RUN} and sum(read) <= 1 << 16


@pytest.mark.parametrize(
    "owner",
    [b"", b"[]", b"{}", b"x" * 100_000, b'{"trace": "none"}', b"[" * 50_000],
)
def test_a_damaged_owner_file_claims_nothing(machine: Machine, owner: bytes) -> None:
    machine.snapshot(9)
    (machine.job / "owner.json").write_bytes(owner)
    assert claim_of(machine.job, machine.directory) is None


def test_what_a_claim_holds(machine: Machine, full: list[str]) -> None:
    machine.snapshot(9)
    begin(machine)
    owner = json.loads((machine.job / "owner.json").read_text())
    assert (owner["trace"], owner["run_id"], len(owner["directory_identity"])) == ("none", RUN, 3)
    assert owner["created"] > EPOCH_0 and not list(lines_backwards(machine.directory / "events.jsonl"))
