"""Steps and losses of rank 0 over all restarts: from a worker's ring to the file in the run directory."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.progress_log import PROGRESS_FILE, ProgressLog, read_pieces
from mindx_elastic.core.progress_ring import CAPACITY, Point, ProgressRing, RingReader, ring_path


def fill(ring: ProgressRing, steps: range, start_ns: int = 0) -> None:
    for step in steps:
        ring.add(Point(step, start_ns + step * 10**8, step / 4))


def test_a_reader_gets_each_point_once_also_behind_a_replacement(tmp_path: Path) -> None:
    reader = RingReader(tmp_path / "ring")
    assert reader.take() == []
    ring = ProgressRing(tmp_path / "ring")
    fill(ring, range(5))
    assert [[point.step for point in points] for _, points in reader.take()] == [[0, 1, 2, 3, 4]]
    fill(ring, range(5, 7))
    other = ProgressRing(tmp_path / "ring")
    fill(other, range(3))
    assert [[point.step for point in points] for _, points in reader.take()] == [[5, 6], [0, 1, 2]]
    assert reader.take() == []
    reader.close()


def test_of_an_overrun_ring_only_whole_points_are_taken(tmp_path: Path) -> None:
    ring, reader = ProgressRing(tmp_path / "ring"), RingReader(tmp_path / "ring")
    fill(ring, range(3 * CAPACITY + 5))
    ((_, points),) = reader.take()
    assert [point.step for point in points] == list(range(2 * CAPACITY + 6, 3 * CAPACITY + 5))
    assert all(point.loss == point.step / 4 for point in points)
    reader.close()


def test_a_file_that_is_no_ring(tmp_path: Path) -> None:
    (tmp_path / "ring").write_bytes(b"x" * 100)
    reader = RingReader(tmp_path / "ring")
    assert reader.take() == []
    reader.close()


def written(folder: Path) -> list[list[Any]]:
    pieces, _ = read_pieces(folder / PROGRESS_FILE)
    return [[piece.attempt, [step for _, step, _ in piece.points]] for piece in pieces]


def test_restarts_and_other_agents_go_on_in_one_file(tmp_path: Path) -> None:
    for attempt in (0, 1):
        log = ProgressLog(tmp_path, tmp_path)
        ring = ProgressRing(ring_path(tmp_path, 0))
        fill(ring, range(10 * attempt, 10 * attempt + 4), time.monotonic_ns())
        log.look(attempt, {}, at_end=True)
        log.close()
        with open(tmp_path / PROGRESS_FILE, "a") as file:
            file.write("{half a line")  # the agent was killed
    log = ProgressLog(tmp_path, tmp_path)
    fill(ProgressRing(ring_path(tmp_path, 0)), range(30, 32), time.monotonic_ns())
    log.look(2, {}, at_end=True)
    log.close()
    assert read_pieces(tmp_path / PROGRESS_FILE)[1] == 2, "what was cut off is counted, and spoils nothing"
    assert written(tmp_path) == [[0, [0, 1, 2, 3]], [1, [10, 11, 12, 13]], [2, [30, 31]]]


def test_a_long_run_stays_small_and_keeps_its_ends(tmp_path: Path) -> None:
    log = ProgressLog(tmp_path, tmp_path)
    ring = ProgressRing(ring_path(tmp_path, 0))
    count, batch = 1 << 16, CAPACITY // 2
    for begin in range(0, count, batch):
        fill(ring, range(begin, begin + batch))
        log.look(0, {}, at_end=begin + batch >= count)
        log._thread.call(lambda: None, 60.0)
        log._next_s = 0.0
    log.close()
    assert (tmp_path / PROGRESS_FILE).stat().st_size < 1 << 20
    ((_, steps),) = written(tmp_path)
    assert len(steps) < 16_384 and steps[0] == 0 and steps[-1] == count - 1
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert steps == sorted(steps) and max(gaps) <= 1 + count // 4096, "spread over all of it"


@pytest.mark.parametrize(
    "line",
    [
        *("[]", "null", "{", "7", "[" * 9000, '{"agent": "a"}', '{"agent": 1, "attempt": 0, "pid": 1, "points": []}'),
        '{"agent": "a", "attempt": "0", "pid": 1, "points": []}',
    ],
)
def test_lines_that_are_none_are_counted(tmp_path: Path, line: str) -> None:
    (tmp_path / "f").write_text(f"{line}\n")
    assert read_pieces(tmp_path / "f") == ([], 1)


def test_values_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    odd: list[Any] = [
        "1",
        None,
        [],
        [1],
        [1, 2, 3, 4],
        ["1", 2, 3],
        [1, "2", 3],
        [-1, 2, 3],
        [1, -2, 3],
        [1, 1 << 80, 3],
    ]
    odd += [[1 << 80, 2, 3], [True, 2, 3], [1, True, 3], [float("inf"), 1, 1]]
    good = [[1.0, 2, 3.5], [2.0, 3, None], [3.0, 4, "not finite"], [4.0, 5, "<script>"], [5.0, 6, 10**400]]
    line = {"agent": "a", "attempt": 0, "pid": 1, "stall_s": float("nan"), "points": [*odd, *good]}
    (tmp_path / "f").write_text(json.dumps(line))
    ((piece,), torn) = read_pieces(tmp_path / "f")
    assert not torn and piece.stall_s == 0.0
    assert [point[:2] for point in piece.points] == [(1.0, 2), (2.0, 3), (3.0, 4), (4.0, 5), (5.0, 6)]
    losses = [loss for *_, loss in piece.points]
    assert losses[:2] == [3.5, None] and losses[2] is not None and math.isnan(losses[2]) and losses[3:] == [None, None]
