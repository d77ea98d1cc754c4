"""The boundary ring: what was written last can be read, whenever the writer was killed."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mindx_elastic.errors import ArenaError
from mindx_elastic.memory.boundary_ring import BoundaryRecord, BoundaryRing, read_ring

RUN = "20260102T030405-abcdef01"
_WRITER = """
import sys
from pathlib import Path
from mindx_elastic.memory.boundary_ring import BoundaryRing
ring = BoundaryRing(Path(sys.argv[1]), "run", 1 << 20)
step = 0
while True:
    step += 1
    ring.write(0, step, [memoryview(bytes([step % 256]) * (1 << 20))], forecast=step % 2 == 0)
    if step == 8:
        print("WRITING", flush=True)
"""


def write(ring: BoundaryRing, step: int, *, attempt: int = 0, forecast: bool = False, trusted: bool = True) -> None:
    pieces = [memoryview(f"state {step}".encode()), memoryview(b""), memoryview(b" forecast" * forecast)]
    assert ring.write(attempt, step, pieces, forecast=forecast, trusted=trusted)


def facts(records: Sequence[BoundaryRecord]) -> list[tuple[int, int, bool]]:
    for record in records:
        assert record.content == f"state {record.step}".encode() + b" forecast" * record.forecast
    return [(record.attempt, record.step, record.forecast) for record in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "boundaries"


def test_the_newest_records_come_first_and_the_oldest_go(path: Path) -> None:
    ring = BoundaryRing(path, RUN, 64)
    assert read_ring(path) == []
    for step in range(1, 8):
        write(ring, step)
        assert [record.step for record in read_ring(path)] == list(range(step, max(0, step - 4), -1))
    assert {record.run_id for record in read_ring(path)} == {RUN}
    assert path.stat().st_mode & 0o777 == 0o600
    ring.close()
    assert facts(read_ring(path)) == [(0, step, False) for step in (7, 6, 5, 4)]


def test_forecasts_have_places_of_their_own(path: Path) -> None:
    ring = BoundaryRing(path, RUN, 64)
    for step in range(1, 7):
        write(ring, step, forecast=True, trusted=step != 6)
        write(ring, step)
    write(ring, 7, forecast=True)
    records = read_ring(path)
    assert facts(records) == [
        *((0, 7, True), (0, 6, False), (0, 6, True), (0, 5, False), (0, 4, False), (0, 3, False)),
    ]
    assert [record.trusted for record in records] == [True, True, False, True, True, True]


def test_a_later_attempt_goes_before_higher_steps_of_an_earlier_one(path: Path) -> None:
    ring = BoundaryRing(path, RUN, 64)
    write(ring, 9)
    write(ring, 5, attempt=1)
    assert facts(read_ring(path)) == [(1, 5, False), (0, 9, False)]


def test_a_new_process_of_the_run_goes_on(path: Path) -> None:
    for first in (1, 6):
        ring = BoundaryRing(path, RUN, 64)
        for step in range(first, first + 5):
            write(ring, step)
        write(ring, first + 5, forecast=True)
        ring.close()
    assert facts(read_ring(path)) == [(0, 11, True), *((0, step, False) for step in (10, 9, 8, 7)), (0, 6, True)]
    ring = BoundaryRing(path, RUN, 32)
    assert ring.capacity == 64, "a smaller one is not made"
    write(ring, 11)
    assert [record.step for record in read_ring(path) if not record.forecast] == [11, 10, 9, 8]


def test_another_runs_file_is_not_mixed_in(path: Path) -> None:
    write(BoundaryRing(path, "other", 64), 3)
    ring = BoundaryRing(path, RUN, 64)
    assert read_ring(path) == []
    write(ring, 1)
    assert [(record.run_id, record.step) for record in read_ring(path)] == [(RUN, 1)]


def test_a_larger_state_takes_the_older_boundaries_along(path: Path) -> None:
    ring = BoundaryRing(path, RUN, 64)
    for step in (1, 2, 3):
        write(ring, step)
    write(ring, 4, forecast=True, trusted=False)
    assert not ring.write(0, 4, [memoryview(b"x" * 40), memoryview(b"x" * 25)])
    expected = [(0, 4, True), (0, 3, False), (0, 2, False), (0, 1, False)]
    assert facts(read_ring(path)) == expected, "nothing was touched"
    ring.close()
    larger = BoundaryRing(path, RUN, 128)
    assert facts(read_ring(path)) == expected and not read_ring(path)[0].trusted
    assert larger.write(0, 4, [memoryview(b"x" * 128)])
    assert [record.step for record in read_ring(path) if not record.forecast] == [4, 3, 2, 1]
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def test_no_room_for_a_larger_one_leaves_the_old(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(BoundaryRing(path, RUN, 64), 1)

    def no_room(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(ArenaError, match="no room"):
        BoundaryRing(path, RUN, 1 << 20)
    assert facts(read_ring(path)) == [(0, 1, False)]


# --- killed ---


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_write_that_was_cut_off_costs_the_oldest_record_only(
    path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    ring = BoundaryRing(path, RUN, 64)
    for step in range(1, 5):
        write(ring, step)
    count = 0

    class Killed(BaseException):
        pass

    class Digest:
        """The process dies over the n-th piece."""

        def update(self, piece: memoryview) -> None:
            nonlocal count
            count += 1
            if count == pieces:
                raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("mindx_elastic.memory.boundary_ring.xxhash.xxh3_128", Digest)
        with pytest.raises(Killed):
            write(ring, 5)
    assert count == pieces
    assert facts(read_ring(path)) == [(0, step, False) for step in (4, 3, 2)]
    again = BoundaryRing(path, RUN, 64)
    write(again, 5)
    assert facts(read_ring(path))[:3] == [(0, step, False) for step in (5, 4, 3)]


def test_a_process_that_is_killed_while_it_writes(path: Path) -> None:
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "WRITING\n"
        finally:
            process.kill()
            process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        records = read_ring(path)
        boundaries = [record.step for record in records if not record.forecast]
        assert len(boundaries) >= 3, "only the place that was being written is lost"
        for record in records:
            assert record.content == bytes([record.step % 256]) * (1 << 20)
            assert record.forecast == (record.step % 2 == 0)
        path.unlink()


@pytest.mark.parametrize("at", ["content", "length", "sequence", "digest"])
def test_a_changed_byte_makes_no_record(path: Path, at: str) -> None:
    ring = BoundaryRing(path, RUN, 64)
    write(ring, 1)
    write(ring, 2)
    ring.close()
    data = bytearray(path.read_bytes())
    place = 128 + (64 + 64)  # of step 2
    assert struct.unpack_from("<Qqq", data, place) == (4, 0, 2)
    data[place + {"content": 64, "length": 24, "sequence": 0, "digest": 40}[at]] ^= 1
    path.write_bytes(data)
    assert facts(read_ring(path)) == [(0, 1, False)]


@pytest.mark.parametrize("size", [0, 10, 127, 128, 500])
def test_a_cut_off_file_holds_nothing(path: Path, size: int) -> None:
    write(BoundaryRing(path, RUN, 64), 1)
    os.truncate(path, size)
    assert read_ring(path) == []
    write(BoundaryRing(path, RUN, 64), 2)
    assert 2 in [record.step for record in read_ring(path)]


def test_a_file_of_something_else_holds_nothing_and_is_replaced(path: Path) -> None:
    path.write_bytes(b"x" * 10_000)
    assert read_ring(path) == []
    write(BoundaryRing(path, RUN, 64), 2)
    assert facts(read_ring(path)) == [(0, 2, False)]


def test_no_file_is_an_error_of_the_system(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_ring(path)


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    write(BoundaryRing(tmp_path / "other", RUN, 64), 1)
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        read_ring(path)
    ring = BoundaryRing(path, RUN, 64)  # replaced, not written through
    write(ring, 2)
    assert not path.is_symlink()
    assert facts(read_ring(tmp_path / "other")) == [(0, 1, False)]
