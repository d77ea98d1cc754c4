"""Arena slots: a copied and sealed one is a finished checkpoint file, and a start finds only such."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.memory import snapshots
from mindx_elastic.memory.arena import RankArena, SlotRecord, SlotState
from mindx_elastic.memory.snapshots import adopt_slots, copy_snapshot, lay_out, seal_slot
from mindx_elastic.persist.reader import map_checkpoint, read_checkpoint
from mindx_elastic.persist.writer import write_checkpoint
from tests.checkpoint_files import STATE, info_of
from tests.persist.states import assert_same

STAGES = ["wiped", "reserved", "copying", "copied", "headed", "committed"]
LAYOUT = {"model.weight": {"shape": [2000], "offsets": [0]}}


class KilledError(Exception):
    """Stands for a process that ends here; `tests/system/test_killed.py` does it for real."""


def state_of(step: int) -> dict[str, Any]:
    return {**STATE, "step": torch.full((300,), step)}


class Job:
    """One process after the other with the same arena."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "shm", folder / "ckpt"
        self._place[0].mkdir()
        self.arena = RankArena(*self._place, 0)

    def restart(self) -> list[str]:
        """A new process adopts the arena; what it has to say."""
        self.arena.close()
        self.arena = RankArena(*self._place, 0)
        return adopt_slots(self.arena)

    def copy(self, step: int, *, state: object = None, die_at: str = "", **options: Any) -> int | None:
        stages: list[str] = []

        def at(stage: str) -> None:
            stages.append(stage)
            if stage == die_at:
                raise KilledError(stage)

        snapshot = lay_out(state_of(step) if state is None else state, info_of(step), options.pop("layout", None))
        try:
            return copy_snapshot(self.arena, snapshot, self.arena.newest().sequence + 1, at=at, **options)
        finally:
            assert stages == [stage for stage in STAGES if stage in stages], "in the documented order"

    def take(self, step: int) -> int:
        index = self.copy(step)
        assert index is not None and seal_slot(self.arena, index)
        return index

    def path(self, index: int) -> Path:
        return self.arena.slots[index].path

    def steps(self) -> set[int]:
        """Steps of the slots that are sound checkpoint files."""
        found = set()
        for slot in self.arena.slots:
            if slot.path.exists():
                checkpoint = read_checkpoint(slot.path)
                assert_same(checkpoint.state, state_of(checkpoint.info.step))
                found.add(checkpoint.info.step)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.arena.close()


# --- the same bytes as on disk ---


@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_a_sealed_slot_is_the_file_that_a_save_writes(job: Job, tmp_path: Path, layout: dict[str, Any] | None) -> None:
    index = job.copy(3, layout=layout)
    assert index == 0 and job.arena.record(0).state is SlotState.COPIED
    with pytest.raises(CorruptCheckpointError, match="digest does not match"):
        read_checkpoint(job.path(0))
    assert seal_slot(job.arena, index)
    record = job.arena.record(0)
    assert (record.state, record.step, record.sequence) == (SlotState.SEALED, 3, 1)
    write_checkpoint(tmp_path / "saved.safetensors", state_of(3), info_of(3), layout=layout)
    assert job.path(0).read_bytes() == (tmp_path / "saved.safetensors").read_bytes()
    assert record.nbytes == job.path(0).stat().st_size


def test_a_slot_is_mapped_before_and_while_it_is_sealed(job: Job) -> None:
    index = job.copy(3)
    assert index is not None
    draft, file = job.path(index).read_bytes(), job.path(index)
    assert_same(map_checkpoint(file).state, state_of(3))
    assert seal_slot(job.arena, index)
    header = file.read_bytes()[: job.arena.record(index).header_bytes]
    for torn in range(0, len(header), 97):  # as far as a process has come that writes it at this moment
        file.write_bytes(header[:torn] + draft[torn:])
        assert_same(map_checkpoint(file).state, state_of(3))


# --- killed ---


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_killed_at_every_stage_of_a_copy(job: Job, stage: str, before: int) -> None:
    for step in range(1, before + 1):
        job.take(step)
    with pytest.raises(KilledError, match=stage):
        job.copy(9, die_at=stage)
    assert job.restart() == []
    other = {before} - {0}
    assert job.steps() == (other | {9} if stage == "committed" else other)
    job.take(10)
    job.take(11)
    assert job.steps() == {10, 11}


def test_a_seal_gives_way_and_can_be_done_later(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_HASH_PIECE", 100)
    index = job.copy(5)
    assert index is not None
    asked = iter([True] * 7 + [False])
    assert not seal_slot(job.arena, index, go_on=lambda: next(asked))
    assert list(asked) == [] and job.arena.record(index).state is SlotState.COPIED
    assert job.copy(6) == 1 - index
    job.restart()
    assert job.steps() == {5, 6}


# --- adopting ---


def cut(path: Path, record: SlotRecord) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path, record: SlotRecord) -> None:
    path.unlink()


def spoil_header(path: Path, record: SlotRecord) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 50 + data[58:])


def replace_header(path: Path, record: SlotRecord) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b'"text"'.ljust(record.header_bytes - 8) + data[record.header_bytes :])


@pytest.mark.parametrize("damage", [cut, remove, spoil_header, replace_header])
def test_a_damaged_slot_is_emptied_and_named(job: Job, damage: Callable[[Path, SlotRecord], None]) -> None:
    job.take(1)
    assert job.copy(2) == 1
    damage(job.path(1), job.arena.record(1))
    (note,) = job.restart()
    assert str(job.path(1)) in note and "is not used" in note
    assert job.arena.record(1) == SlotRecord() and not job.path(1).exists()
    assert job.steps() == {1}
    assert job.take(3) == 1 and job.steps() == {1, 3}


def test_a_slot_without_a_record_is_removed_however_good_it_looks(job: Job) -> None:
    job.take(1)
    job.arena.set_record(0, SlotRecord())
    assert job.restart() == [] and not job.path(0).exists()
