"""The event log, one JSON object a line in ``events.jsonl``: its writer (`EventLog`), its reader (`read_events`). And
the package's log lines on the console.

Format: time (unix s), run_id, attempt, rank, step, event, reason, duration_s, bytes, outcome;
further keys where an event has them. Every rank appends to the same file with single `write` calls on an
`O_APPEND` descriptor, so lines of several ranks do not mix on a local file system. The file is bounded: see `EventLog`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from mindx_elastic.core.owners import Owners
from mindx_elastic.core.posix import open_regular
from mindx_elastic.core.printable import printable, printable_block
from mindx_elastic.core.ready_thread import ReadyThread

__all__ = [
    "EVENTS_FILE",
    "GENERATION_BYTES",
    "READ_BYTES",
    "EventLog",
    "LogOnce",
    "RankFilter",
    "attach_console",
    "events_backwards",
    "lines_backwards",
    "logger",
    "older_generation",
    "parse_event",
    "read_events",
]

EVENTS_FILE = "events.jsonl"
"""Name of the event log, in a checkpoint directory and in an agent's run directory."""


class _Shown(logging.Filter):
    """Escapes what others have put into a message: file names, reasons, texts of exceptions.

    On the logger, not on a handler: the program may have its own handlers. A record is one line, but for tracebacks.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            record.msg, record.args = printable(record.getMessage()), None
        except Exception:  # a message that does not fit its arguments: the handler reports it
            return True
        if record.exc_info and not record.exc_text:
            record.exc_text = printable_block(logging.Formatter().formatException(record.exc_info))
        return True


logger = logging.getLogger("mindx_elastic")
logger.addFilter(_Shown())
GENERATION_BYTES = 4 << 20
"""A log that has grown to this is moved to ``{name}.1``, and a new one begun: some 12,000 lines each."""
READ_BYTES = 2 * GENERATION_BYTES
"""At most so much of each of the two files is read, whatever its size: one that cannot be moved, or an old one."""
_MAX_LINE = 1 << 20
_TAIL_BYTES = 1 << 18
_PIECE_BYTES = 1 << 16
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PATIENCE_S = 0.5  # a line takes 50 us; under a busy interpreter a few milliseconds
_HANGS_S = 10.0
_MAX_WAITING = 1000  # lines kept in memory for a log that hangs
_OF_A_RANK = re.compile(r"rank_\d+| on rank \d+|\d+\.\d+")  # its folder, the one that failed, what each has measured
_SAVED = " saved in "  # which file is durable is each rank's own to say
_MOST_CLAIMS = 256


class LogOnce:
    """A log line that all ranks of a job have to say comes once: the first rank of a machine that says it claims it.
    Any thread.

    The claim is a socket with a name in Linux's abstract namespace: taking one is atomic and takes some microseconds,
    waits for no rank, disk or store (lines are written by dying processes, too), and goes with the process: another
    rank may come to the same line later. Ranks on other machines, or in other network namespaces, say their lines
    themselves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._num_claims = 0

    def is_first(self, job: str, text: str) -> bool:
        """Whether this process is to say `text`: no other one of `job` has said it as often."""
        if _SAVED in text:
            return True
        key = f"{job}/{_OF_A_RANK.sub('', text)}"
        with self._lock:
            number = self._counts[key] = self._counts.get(key, 0) + 1
            if self._num_claims >= _MOST_CLAIMS:
                return True
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0mindx-line-{xxhash.xxh3_128_hexdigest(f'{number}/{key}'.encode())}")
            except OSError as error:
                claim.close()
                return error.errno != errno.EADDRINUSE
            claim.detach()  # the descriptor stays open
            self._num_claims += 1
            return True


_said_once = LogOnce()


class RankFilter(logging.Filter):
    """Puts rank, step and attempt in front of every line of the package's console handler, and leaves out what another
    rank has said (see `LogOnce`; errors come from each)."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, attempt: int = 0, process: str = "mindx_elastic") -> None:
        """`process`: what comes first, to tell an agent's or a scheduler's lines from a rank's."""
        super().__init__()
        self._process = process
        self.rank, self.world_size, self.attempt = rank, world_size, attempt
        self.step: int | None = None
        self.events: EventLog | None = None
        """It knows the run; None, or before it has an id: every line comes."""
        self.said = _said_once

    def filter(self, record: logging.LogRecord) -> bool:
        events = self.events if self.world_size > 1 and record.levelno < logging.ERROR else None
        run = f"{events.run_id}/{events.attempt}" if events is not None and events.run_id else ""
        if run and not self.said.is_first(run, record.getMessage()):
            return False
        where = [] if self.world_size == 1 else [f"rank {self.rank}"]
        where += [] if self.step is None else [f"step {self.step}"]
        where += [f"attempt {self.attempt}"] if self.attempt else []
        record.mindx_where = " ".join([self._process, *where])
        return True


def attach_console(rank_filter: RankFilter, level: str) -> logging.Handler | None:
    """Give the package's logger a stderr handler, unless the program has configured logging itself.

    The lines a user waits for ("Graceful exit is triggered, stop training.") must be seen without any logging set-up;
    the root logger is never touched. Returns the handler to remove later, or None.
    """
    if logger.handlers or logging.getLogger().handlers:
        return None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(mindx_where)s] %(levelname)s %(message)s"))
    handler.addFilter(rank_filter)
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler


class EventLog:
    """Appends events to `path`; usable from any thread. It never raises: an event that cannot be written is lost, and
    the log says so.

    Every line goes to the file that has the name at that moment, in one `write` on an `O_APPEND` descriptor. So any
    writer may move a file that has grown to `generation_bytes` to ``{name}.1``; the others follow with their next line.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str = "",
        attempt: int = 0,
        rank: int = 0,
        generation_bytes: int = GENERATION_BYTES,
        owners: Owners | None = None,
    ) -> None:
        """`owners`: the users whose log is read; None: any user's."""
        self.path = path
        self.run_id, self.attempt, self.rank = run_id, attempt, rank
        self._generation_bytes = self._rotate_from = generation_bytes
        self._owners = owners
        self._lock = threading.Lock()
        self._lost = 0  # since the last event that was written
        self._is_cut_off = False  # the disk was full in the middle of the last line
        self._recorded_run: str | None = None
        self._aside: ReadyThread | None = None
        self._late_since: float | None = None
        self.hurry = False
        """A stop is under way: what is written aside is written in its own time, and `close` or `flush` wait for it."""

    @property
    def is_recorded(self) -> bool:
        """Whether the file has a line of this run from this process. Any thread."""
        return self._recorded_run == self.run_id

    def write_aside(self) -> None:
        """Let another thread write from now on, so that an event takes a moment at most.

        The file system of a log may hang, and must not keep a job from stopping. Raises RuntimeError when there can be
        no more threads.
        """
        self._aside = ReadyThread("mindx-events")
        self._aside.start()

    def flush(self) -> None:
        """Wait for that thread, not for long."""
        if self._aside is not None:
            with suppress(TimeoutError):
                self._aside.call(lambda: None, _PATIENCE_S if self._late_since is None else 0.0)

    def close(self) -> None:
        """End that thread; leave it where it hangs."""
        if self._aside is not None:
            self._aside.close(_PATIENCE_S)
            self._aside = None

    def has_ended(self, rank: int) -> bool:
        """Whether this log says that `rank` has finished in this attempt. Any thread; reads the log's last lines."""
        wanted = {"run_id": self.run_id, "attempt": self.attempt, "rank": rank, "event": "end"}
        for path in (self.path, older_generation(self.path)):
            for line in lines_backwards(path, _TAIL_BYTES, self._owners):
                if b'"end"' in line:
                    found = parse_event(line)
                    if found is not None and all(found.get(key) == value for key, value in wanted.items()):
                        return True
        return False

    def emit(
        self,
        event: str,
        *,
        step: int | None = None,
        reason: str | None = None,
        duration_s: float | None = None,
        nbytes: int | None = None,
        outcome: str | None = None,
        **more: Any,
    ) -> None:
        """Record one event. Keyword values must be JSON-able; unknown objects are written as their `str`."""
        line = {"time": round(time.time(), 6), "run_id": self.run_id, "attempt": self.attempt, "rank": self.rank}
        fields: dict[str, Any] = {
            **line,
            "step": step,
            "event": event,
            "reason": reason,
            "duration_s": None if duration_s is None else round(duration_s, 6),
            "bytes": nbytes,
            "outcome": outcome,
            **more,
        }
        data = (json.dumps(fields, default=str) + "\n").encode()
        run_id = self.run_id
        if self._aside is None:
            self._record(data, run_id)
        else:
            self._record_aside(self._aside, data, run_id)

    def _record_aside(self, aside: ReadyThread, data: bytes, run_id: str) -> None:
        now, waiting = time.monotonic(), aside.num_waiting
        if not waiting:
            self._late_since = None
        elif self._late_since is not None and now - self._late_since > _HANGS_S:
            logger.warning("%s has not taken an event for %.0f s; events no longer wait for it", self.path, _HANGS_S)
            self._late_since = math.inf  # said
        if waiting > _MAX_WAITING:
            return
        job = aside.submit(lambda: self._record(data, run_id))
        if self.hurry:
            return
        try:
            job.wait(_PATIENCE_S if self._late_since is None else 0.0)
        except TimeoutError:
            self._late_since = now if self._late_since is None else self._late_since

    def _record(self, data: bytes, run_id: str) -> None:
        with self._lock:
            try:
                self._append(data)
            except OSError as error:
                if not self._lost:
                    why = error.strerror or error
                    logger.warning("cannot append to %s (%s); events are lost until it works again", self.path, why)
                self._lost += 1
                return
            if self._lost:
                logger.warning("%s can be written again: %d earlier events were lost", self.path, self._lost)
            self._lost = 0
            self._recorded_run = run_id

    def _append(self, data: bytes) -> None:
        """Raises OSError; the file may then end in half a line, behind which another rank's line is read all the same
        (`parse_event`)."""
        # Opened for each line: events are rare, and no descriptor leaks into forked loader workers.
        fd = open_regular(self.path, _FLAGS, 0o644)
        try:
            data = b"\n" * self._is_cut_off + data
            written = os.write(fd, data)
            self._is_cut_off = written < len(data)
            if self._is_cut_off:
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written", str(self.path))
            if (size := os.fstat(fd).st_size) > self._rotate_from:
                self._rotate(fd, size)
        finally:
            os.close(fd)

    def _rotate(self, fd: int, size: int) -> None:
        """Move the full file that `fd` has open out of the way; unless another writer does, or has done so."""
        older = older_generation(self.path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS or self.rank != 0:
                return  # it is being done; or nothing can be locked there: rank 0 does it
        try:
            # A process that renames this file holds its lock, so the file cannot change before the rename.
            if not os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False)):
                return
            os.replace(self.path, older)
            self._rotate_from = self._generation_bytes
        except OSError as error:  # the line itself is written, and nothing is lost: both files are read
            self._rotate_from = size + self._generation_bytes  # looking through the log at each event would take long
            logger.warning("%s has %d MiB and cannot be moved to %s: %s", self.path, size >> 20, older, error)


def older_generation(path: Path) -> Path:
    """Where the lines are that were written to the log `path` before its newest ones."""
    return path.with_name(f"{path.name}.1")


def lines_backwards(path: Path, limit_bytes: int = READ_BYTES, owners: Owners | None = None) -> Iterator[bytes]:
    """The lines of a log without their ends, the newest first, of its last `limit_bytes` only.

    The first line within them may be cut off. A file that is not there, cannot be read, or is a stranger's (`owners`:
    whose files count; None: anybody's) has none. Any thread.
    """
    try:
        fd = open_regular(path)
    except OSError:
        return
    try:
        status = os.fstat(fd)
        if owners is not None and (problem := owners.problem(status)) is not None:
            logger.warning("%s %s; what it says of runs is left out", path, problem)
            return
        end, least = status.st_size, max(0, status.st_size - limit_bytes)
        rest: list[bytes] = []  # of a line whose beginning is further in front, back to front
        while end > least:
            start = max(least, end - _PIECE_BYTES)
            piece = os.pread(fd, end - start, start)
            end = start
            head, *lines = piece.split(b"\n")
            if not lines:
                rest.append(head)
                continue
            lines[-1] += b"".join(reversed(rest))
            rest = [head]
            yield from (line for line in reversed(lines) if line)
        if first := b"".join(reversed(rest)):
            yield first
    except OSError:
        return
    finally:
        os.close(fd)


def events_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The events in these lines."""
    return (event for line in lines_backwards(path) if (event := parse_event(line)) is not None)


def read_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events of the log `path` and of its older generation, the oldest first; and how many lines are none.

    Of each file its last `READ_BYTES`. What a kill or a full disk has cut off, and lines of other programs, are left
    out. Values are not trusted: `core.values` reads them. Raises OSError.
    """
    events: list[dict[str, Any]] = []
    num_others = 0
    older = older_generation(path)
    for each in (older, path) if os.path.lexists(older) else (path,):
        with open(open_regular(each, follow_link=True), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
            while line := file.readline(_MAX_LINE):
                if (event := parse_event(line)) is not None:
                    events.append(event)
                elif line != b"\n":
                    num_others += 1
    return events, num_others


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event in a line of a log; None: there is none in it."""
    start = line.rfind(b'{"time"')  # a line that was cut off is followed by the next one
    for part in (line, line[start:] if start > 0 else b""):
        try:
            found = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("event"), str):
            return found
    return None
