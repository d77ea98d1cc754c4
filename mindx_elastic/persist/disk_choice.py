"""Chooses by measurement whether saves go around the page cache, as usual, or through it.

Which is faster depends on what the disk is. On one virtual disk a save with direct I/O was 2.25 times as fast as the
best of what writes through the page cache; on another one the page cache was 1.7 to 1.9 times as fast, if it is
flushed on the way. Nothing that a file system says of itself tells them apart.

So one rank of a node writes some files both ways at its start, beside the first steps, and notes the outcome in the
checkpoint directory, where all find it that see the same disk: other ranks, other nodes of a shared one, later starts.
Only for states large enough to make a difference that one can feel. A save that comes meanwhile ends the measurement,
and goes the usual way.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import open_regular
from mindx_elastic.persist.direct_io import BlockWriter, preallocate
from mindx_elastic.persist.storage import create_temp, free_space, nameless_file, publish

__all__ = ["LEAST_BYTES", "MOST_RANK", "DiskChoice", "DiskChooser", "measure"]

LEAST_BYTES = 256 << 20
"""Of a state for which it is measured: a smaller one is on the disk in a second, either way."""
MOST_RANK = 63
"""The last rank that may measure: thousands of ranks that start together would measure each other."""
_TEST_BYTES = 128 << 20  # with 32 MiB the outcome was the opposite in 2 of 8 times, with these in none
_PIECE_BYTES = 4 << 20
_RANDOM_BYTES = 8 << 20
_FREE_TIMES = 20  # the room that must be free
_CLEARLY = 1.1
_VALID_S = 24 * 3600.0
_NOTE = "disk-choice.json"
_MOST_NOTE_BYTES = 4096


class _Interrupted(Exception):
    pass


@dataclass(frozen=True)
class DiskChoice:
    """What was measured in one directory."""

    direct_s: float
    cached_s: float
    """Seconds until as many bytes were durable."""
    created: float
    """Unix seconds."""

    @property
    def is_cached(self) -> bool:
        """Whether the page cache is clearly faster."""
        return self.cached_s * _CLEARLY < self.direct_s

    @property
    def is_new(self) -> bool:
        """Whether a start need not measure again. An old one is followed all the same: a job may run for months."""
        return 0 <= time.time() - self.created < _VALID_S


class DiskChooser:
    """One per guard. `start` and `close` belong to the main thread; `is_cached` to any."""

    def __init__(self, directory: Path, *, measures: bool) -> None:
        """`directory`: where the checkpoints are. `measures`: whether this rank does, where nobody has."""
        self._directory, self._measures = directory, measures
        self._choice: DiskChoice | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Measure beside the training, unless that was done today."""
        self._choice = _read(self._directory)
        if not self._measures or (self._choice is not None and self._choice.is_new):
            return
        thread = threading.Thread(target=self._measure, name="mindx-disk", daemon=True)
        with suppress(RuntimeError):  # the process is at its limit
            thread.start()
            self._thread = thread

    def _measure(self) -> None:
        try:
            self._choice = choice = measure(self._directory, self._stopped)
            if choice is not None:
                _write(self._directory, choice)
        except (OSError, RuntimeError, MemoryError) as error:
            logger.debug("how fast %s is cannot be measured (%s): saves use direct I/O", self._directory, error)

    def is_cached(self, folder: Path) -> bool:
        """Whether a save into `folder` goes through the page cache."""
        self._stopped.set()
        choice = self._choice = self._choice or _read(self._directory)
        try:
            is_cached = choice is not None and choice.is_cached
            return is_cached and os.stat(folder).st_dev == os.stat(self._directory).st_dev
        except OSError:
            return False

    def close(self, timeout_s: float = 2.0) -> None:
        """End a measurement."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout_s)


def measure(directory: Path, stopped: threading.Event) -> DiskChoice | None:
    """Write to an existing directory both ways, twice; None: `stopped` was set meanwhile, or too little room is free.

    Blocks; any thread. Leaves nothing behind. Raises OSError.
    """
    if free_space(directory) < _FREE_TIMES * _TEST_BYTES:
        return None
    noise = torch.frombuffer(bytearray(os.urandom(_RANDOM_BYTES)), dtype=torch.uint8)  # file systems may compress
    took: dict[bool, list[float]] = {False: [], True: []}
    try:
        for cached in (False, True, True, False):
            took[cached].append(_time_one(directory, noise, cached=cached, stopped=stopped))
    except _Interrupted:
        return None
    return DiskChoice(min(took[False]), min(took[True]), time.time())


def _time_one(directory: Path, noise: torch.Tensor, *, cached: bool, stopped: threading.Event) -> float:
    pieces = noise.split(_PIECE_BYTES)
    with nameless_file(directory) as fd:
        began = time.monotonic()
        preallocate(fd, _TEST_BYTES)
        with closing(BlockWriter(fd, 0, cached=cached)) as writer:
            for number in range(_TEST_BYTES // _PIECE_BYTES):
                if stopped.is_set():
                    raise _Interrupted
                writer.put(pieces[number % len(pieces)])
            writer.finish()
        os.fsync(fd)
        return time.monotonic() - began


def _read(directory: Path) -> DiskChoice | None:
    """What was measured last; None: nothing, or it cannot be read."""
    try:
        fd = open_regular(directory / _NOTE, os.O_RDONLY)
        try:
            found = json.loads(os.read(fd, _MOST_NOTE_BYTES))
        finally:
            os.close(fd)
        return DiskChoice(*(float(found[name]) for name in ("direct_s", "cached_s", "created")))
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _write(directory: Path, choice: DiskChoice) -> None:
    fd, temp = create_temp(directory / _NOTE)
    with closing(os.fdopen(fd, "w", encoding="utf-8")) as file:
        json.dump(asdict(choice), file)
        file.flush()
        publish(temp, directory / _NOTE)
