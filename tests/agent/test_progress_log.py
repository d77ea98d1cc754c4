"""Steps and losses of rank 0 over all restarts: from a worker's page to the file in the run directory."""

from __future__ import annotations

import itertools
import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.progress_log import PROGRESS_FILE, ProgressLog, read_pieces
from mindx_elastic.core.status_page import Status, StatusPage, read_page


def status_of(step: int, pid: int = 1, loss: float | None = None, loss_step: int | None = None) -> Status:
    status = Status(pid=pid, step=step, boundaries=1, boundary_ns=step * 10**8)
    if loss is None:
        return status
    (bits,), noted = struct.unpack("=q", struct.pack("=d", loss)), step if loss_step is None else loss_step
    return replace(status, loss_step=noted, loss_check=noted, loss_ns=noted * 10**8, loss_bits=bits)


def test_what_a_page_says_of_losses(tmp_path: Path) -> None:
    page = StatusPage(tmp_path / "page")
    page.note_loss(7, 70, -1.5)
    found = read_page(tmp_path / "page")
    assert found is not None and (found.loss_step, found.loss_ns, found.loss) == (7, 70, -1.5)
    page.set(loss_check=8)  # the next one is being written
    found = read_page(tmp_path / "page")
    assert found is not None and found.loss is None
    page.close()


def test_each_look_adds_what_is_new(tmp_path: Path) -> None:
    log = ProgressLog(tmp_path)
    looks = [
        status_of(3), status_of(3), status_of(5, loss=0.5), status_of(6, loss=0.5, loss_step=5),
        status_of(8, loss=0.25, loss_step=7), status_of(2, pid=2),
    ]  # fmt: skip
    for status in looks:
        log.look(0, {0: status, 1: status_of(99)})
    log.look(0, {0: looks[-1]}, at_end=True)
    log.close()
    pieces, _ = read_pieces(tmp_path / PROGRESS_FILE)
    assert [[point[1:] for point in piece.points] for piece in pieces] == [
        [(2, None)],
        [(3, None), (5, 0.5), (6, None), (7, 0.25)],
    ]


def written(folder: Path) -> list[list[Any]]:
    pieces, _ = read_pieces(folder / PROGRESS_FILE)
    return [[piece.attempt, [step for _, step, _ in piece.points]] for piece in pieces]


def test_restarts_and_other_agents_go_on_in_one_file(tmp_path: Path) -> None:
    for attempt in (0, 1, 2):
        log = ProgressLog(tmp_path)
        for step in range(10 * attempt, 10 * attempt + 3):
            log.look(attempt, {0: status_of(step, pid=attempt + 1)})
        log.look(attempt, {0: status_of(10 * attempt + 3, pid=attempt + 1)}, at_end=True)
        log.close()
        with open(tmp_path / PROGRESS_FILE, "a") as file:
            file.write("{half a line" if attempt < 2 else "")  # the agent was killed
    assert read_pieces(tmp_path / PROGRESS_FILE)[1] == 2, "what was cut off is counted, and spoils nothing"
    assert written(tmp_path) == [[n, [10 * n, 10 * n + 1, 10 * n + 2, 10 * n + 3]] for n in range(3)]


def test_a_long_run_stays_small_and_keeps_its_ends(tmp_path: Path) -> None:
    log = ProgressLog(tmp_path)
    count, batch = 1 << 16, 512
    for begin in range(0, count, batch):
        for step in range(begin, begin + batch):
            log._next_s = math.inf
            log.look(0, {0: status_of(step, loss=step / 4)})
        log._next_s = 0.0
        log.look(0, {0: status_of(begin + batch - 1)}, at_end=begin + batch >= count)
        log._thread.call(lambda: None, 60.0)
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
    line = {"agent": "a", "attempt": 0, "pid": 1, "points": [*odd, *good]}
    (tmp_path / "f").write_text(json.dumps(line))
    ((piece,), torn) = read_pieces(tmp_path / "f")
    assert not torn
    assert [point[:2] for point in piece.points] == [(1.0, 2), (2.0, 3), (3.0, 4), (4.0, 5), (5.0, 6)]
    losses = [loss for *_, loss in piece.points]
    assert losses[:2] == [3.5, None] and losses[2] is not None and math.isnan(losses[2]) and losses[3:] == [None, None]
