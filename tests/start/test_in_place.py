"""Where a rank's state comes from in a recovery in place, without other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.config import RankInfo
from mindx_elastic.core.owners import Trust
from mindx_elastic.errors import CorruptCheckpointError, MismatchError
from mindx_elastic.persist.reader import Checkpoint, read_checkpoint
from mindx_elastic.start.in_place import Boundary, InPlacePart
from mindx_elastic.start.restore import Resumed
from tests.checkpoint_files import write
from tests.start.arenas import RUN, Machine

MOMENT = (RUN, 0, 7)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Rank 1 has been killed in step 7, which rank 0 has passed and copied to shared memory."""
    machine = Machine(tmp_path, 2)
    machine.snapshot(7, ranks=[0], coordinates={"foreseen": 1})
    for step in (6, 7):
        machine.boundary(0, step)
    machine.boundary(1, 6)
    machine.boundary(1, 7, forecast=True, trusted=False)
    return machine


def part(
    machine: Machine, rank: int, slot: Path, live: Checkpoint | None = None, *, donor: int = 0, step: int = 7
) -> InPlacePart:
    moment = (RUN, 0, step)
    boundary = Boundary(
        generation=3, moment=moment, next_attempt=2, live=live, snapshot=lambda: slot, dead=[1], donor=donor
    )
    return InPlacePart(boundary, RankInfo(rank=rank, world_size=2), machine.job, Trust(), ["model"])


def taken(machine: Machine, rank: int, slot: Path, live: Checkpoint | None = None) -> Resumed:
    source = part(machine, rank, slot, live)
    source.follow()
    assert source.resumed is not None and (source.run_id, source.attempt) == (RUN, 2)
    return source.resumed


def slot_of(machine: Machine) -> Path:
    """The donor's newest snapshot."""
    return max((path for path in machine.slots(0) if path.stat().st_size), key=lambda path: path.stat().st_mtime_ns)


def test_a_survivor_takes_its_own_objects_and_a_new_process_its_snapshot_and_its_own_small_state(
    machine: Machine,
) -> None:
    slot = slot_of(machine)
    live = Checkpoint(read_checkpoint(slot).info, {"model": {}}, {})
    survivor = taken(machine, 0, slot, live)
    assert survivor.is_live and survivor.checkpoint is live and survivor.donor is None
    found = taken(machine, 1, slot)
    assert (found.path, found.donor, found.checkpoint.info.moment) == (slot, 0, MOMENT)
    assert found.own is not None and found.own.forecast, "the donor's came out as foreseen, so this one counts"
    assert [record.moment[2] for record in (*found.own_records, *found.donor_records)] == [7, 6, 7, 6]
    machine.snapshot(7, ranks=[0], coordinates={"foreseen": 0})
    assert taken(machine, 1, slot_of(machine)).own is None, "a forecast that was wrong is not used"


def test_what_is_not_that_boundary_or_lies_elsewhere_is_refused(machine: Machine, tmp_path: Path) -> None:
    outside = write(tmp_path / "elsewhere.safetensors", step=7)
    with pytest.raises(CorruptCheckpointError, match="not in the job's shared memory"):
        part(machine, 1, outside).follow()
    machine.snapshot(8, ranks=[0])
    newer = max(machine.slots(0), key=lambda path: read_checkpoint(path).info.step if path.stat().st_size else 0)
    with pytest.raises(CorruptCheckpointError, match="another boundary than step 7"):
        part(machine, 1, newer).follow()
    with pytest.raises(CorruptCheckpointError, match="another boundary than step 7"):
        part(machine, 0, max(machine.slots(0)), donor=1).follow()


def test_ranks_that_have_agreed_on_different_boundaries_are_told(machine: Machine) -> None:
    slot = slot_of(machine)
    first, *others = (part(machine, rank, slot, step=step) for rank, step in ((0, 7), (1, 7), (1, 8)))
    first.merge([first.say(), others[0].say()])
    with pytest.raises(MismatchError, match="different boundaries"):
        first.merge([first.say(), others[1].say()])
