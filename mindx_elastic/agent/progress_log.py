"""``mindx-progress.jsonl`` in the run directory: steps and losses of rank 0 over all restarts, for
`mindx-elastic report`.

The worker notes them on its status page; the agent's main thread takes them from there, twice a second, and hands them
to a thread that writes, so a file system that hangs holds up neither. The older the file, the fewer points are kept:
one in a 4096th of its age, so that a month comes to 40,000 of them, and nothing that was written is touched again.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import open_regular
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.core.status_page import Status
from mindx_elastic.core.values import real, text, whole

__all__ = ["PROGRESS_FILE", "ProgressLog", "ProgressPiece", "read_pieces"]

PROGRESS_FILE = "mindx-progress.jsonl"
_PARTS_OF_AGE, _MOST_A_LINE = 4096, 1 << 15
_MOST_BYTES = 8 << 20
_MOST_STEP, _MOST_TIME = 1 << 62, 1e11
_WRITE_S = 2.0
_CLOSE_S = 2.0
_NS = 1e9


@dataclass
class ProgressPiece:
    """What one process of rank 0 has passed."""

    agent: str
    """Host and process id of its agent, and when that began."""
    attempt: int
    pid: int
    points: list[tuple[float, int, float | None]] = field(default_factory=list)
    """Unix seconds, step, loss (None: the program gave none; it need not be finite), in the order of time."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.agent, self.attempt, self.pid


def read_pieces(path: Path) -> tuple[list[ProgressPiece], int]:
    """The pieces in the order in which they began, and how many lines are none: those are left out, as are values that
    cannot be. Reads 8 MiB at most. Raises OSError."""
    found: dict[tuple[str, int, int], ProgressPiece] = {}
    torn = 0
    with open(open_regular(path, follow_link=True), "rb") as file:
        lines = file.read(_MOST_BYTES).split(b"\n")
    for data in lines:
        if not data:
            continue
        piece = _parse(data)
        if piece is None:
            torn += 1
            continue
        known = found.setdefault(piece.key, piece)
        if known is not piece:
            known.points += piece.points
    for piece in found.values():
        piece.points.sort(key=lambda point: point[:2])
    pieces = [piece for piece in found.values() if piece.points]
    return sorted(pieces, key=lambda piece: piece.points[0][:2]), torn


def _parse(data: bytes) -> ProgressPiece | None:
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("points"), list):
        return None
    agent, attempt, pid = text(line.get("agent")), whole(line.get("attempt")), whole(line.get("pid"))
    if not agent or attempt is None or pid is None:
        return None
    points = [point for each in line["points"][:_MOST_A_LINE] if (point := _point(each)) is not None]
    return ProgressPiece(agent[:200], attempt, pid, points)


def _point(value: object) -> tuple[float, int, float | None] | None:
    if not isinstance(value, list) or len(value) != 3:
        return None
    at, step, loss = real(value[0]) if not _is_huge(value[0]) else None, whole(value[1]), value[2]
    if at is None or step is None or not (0 <= at < _MOST_TIME and 0 <= step < _MOST_STEP):
        return None
    if loss == "not finite":
        return at, step, math.nan
    return at, step, None if _is_huge(loss) else real(loss)


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and abs(value) >= _MOST_STEP


class ProgressLog:
    """One per agent. Main thread, but for what its own thread writes."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / PROGRESS_FILE
        self._agent = f"{socket.gethostname()}.{os.getpid()}.{time.time():.3f}"
        self._taken: tuple[int, int, int] = 0, -1, -1
        """Of the newest points: process id, step, and the newest step with a loss."""
        self._thread = ReadyThread("mindx-progress")
        self._writer = _Writer(self.path)
        self._wall_ns = time.time_ns() - time.monotonic_ns()
        self._waiting: dict[int, ProgressPiece] = {}
        self._next_s = 0.0

    def look(self, attempt: int, statuses: Mapping[int, Status], *, at_end: bool = False) -> None:
        """Take what is new, and now and then have it written. `at_end`: of an attempt."""
        status = statuses.get(0)
        if status is not None and (points := self._new_points(status, at_end=at_end)):
            piece = self._waiting.setdefault(status.pid, ProgressPiece(self._agent, attempt, status.pid))
            piece.points += [self._as_known(*point) for point in points]
        now = time.monotonic()
        if not self._waiting or (now < self._next_s and not at_end) or (self._thread.busy and not at_end):
            return
        self._next_s = now + _WRITE_S
        pieces, self._waiting = list(self._waiting.values()), {}
        self._thread.submit(lambda: self._writer.write(pieces, at_end=at_end))

    def close(self) -> None:
        """The agent's end: wait a moment for what is being written."""
        self._thread.close(_CLOSE_S)

    def _new_points(self, status: Status, *, at_end: bool) -> list[tuple[int, int, float | None]]:
        """What the page says that it did not say at the last look: time, step and loss, the newest last."""
        pid, step, loss_step = self._taken if self._taken[0] == status.pid else (status.pid, -1, -1)
        points: list[tuple[int, int, float | None]] = []
        if status.loss is not None and status.loss_step != loss_step:
            loss_step = status.loss_step
            points.append((status.loss_ns, loss_step, status.loss))
        if status.boundaries and status.step not in (step, loss_step) and (at_end or not points):
            points.append((status.boundary_ns, status.step, None))
        if points:
            self._taken = pid, points[-1][1], loss_step
        return points

    def _as_known(self, clock_ns: int, step: int, loss: float | None) -> tuple[float, int, float | None]:
        return round((self._wall_ns + clock_ns) / _NS, 3), step, loss


class _Writer:
    """The thread's part: what is in the file, and how often a point is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began: float | None = None
        """The time of the file's first point; None: it was not looked at yet."""
        self._newest = 0.0
        """The time of the newest point that was kept."""
        self._is_broken = False

    def write(self, pieces: Sequence[ProgressPiece], *, at_end: bool) -> None:
        try:
            if self._began is None:
                self._began = self._begin(pieces[0].points[0][0])
            kept = [self._choose(piece, self._began, at_end=at_end) for piece in pieces]
            if data := b"".join(_line(piece) for piece in kept if piece.points):
                self._append(data)
        except OSError as error:
            if not self._is_broken:
                logger.warning(
                    "%s cannot be written (%s): what mindx-elastic report shows of steps and losses is incomplete",
                    self._path,
                    error.strerror or error,
                )
            self._is_broken = True

    def _begin(self, now: float) -> float:
        """Go on with what earlier agents have left here."""
        try:
            with open(open_regular(self._path, follow_link=True), "rb") as file:
                first = _parse(file.readline(_MOST_BYTES))
                file.seek(-1, os.SEEK_END)
                is_whole = file.read() == b"\n"
        except OSError:  # there is none, or it is empty
            return now
        if not is_whole:
            self._append(b"\n")  # half a line would spoil the next one
        return min(now, first.points[0][0]) if first is not None and first.points else now

    def _choose(self, piece: ProgressPiece, began: float, *, at_end: bool) -> ProgressPiece:
        kept = []
        for point in piece.points:
            is_last = at_end and point is piece.points[-1]
            if is_last or point[0] - self._newest >= (point[0] - began) / _PARTS_OF_AGE:
                self._newest = point[0]
                kept.append(point)
        return ProgressPiece(piece.agent, piece.attempt, piece.pid, kept)

    def _append(self, data: bytes) -> None:
        fd = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(fd, data) < len(data):
                os.write(fd, b"\n")
        finally:
            os.close(fd)


def _line(piece: ProgressPiece) -> bytes:
    content: dict[str, Any] = {"agent": piece.agent, "attempt": piece.attempt, "pid": piece.pid}
    content["points"] = list(_points(piece))
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()


def _points(piece: ProgressPiece) -> Iterator[list[Any]]:
    for at, step, loss in piece.points:
        if loss is not None:
            yield [at, step, float(f"{loss:.7g}") if math.isfinite(loss) else "not finite"]
        else:
            yield [at, step, None]
