"""Proves that a rank has never saved anything, so that a first save that was cut off may start over.

Where ranks are not replicas, a step is complete only when every rank has its file. After a power cut in the very first
save one rank has a file and another has none. A complete step of which a disk was lost looks the same. The first case
may start over, the second must not. A note "this rank has saved" would not help: it may be lost together with the file.
So the note says the opposite: at a fresh start each rank durably writes "this rank has never published a file", and
removes the note before it publishes its first file. A note that still exists is the proof. A lost disk, a deleted
folder or a full disk can only lose the proof.

A cut between the two, of a few milliseconds, loses the proof as well: the next start asks for a hand.

A note records its own inode number, so that a copy of it (in a backup) proves nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from mindx_elastic.core.posix import open_regular
from mindx_elastic.persist.storage import create_temp, fsync_dir, publish

__all__ = ["FirstSave", "Note", "find_notes", "note_at"]

_PREFIX, _SUFFIX = "first-save-", ".json"
_KEPT = 8  # notes of runs that never saved: a job that dies before its first save, again and again
_MAX_BYTES = 1 << 16
_DIRECTORY_MODE = 0o755


@dataclass(frozen=True)
class Note:
    """A note on disk."""

    path: Path
    run_id: str
    rank: int
    world_size: int

    def touch(self) -> None:
        """Make it younger than the other notes of its folder, so that it is kept longer."""
        with suppress(OSError):
            os.utime(self.path)


class FirstSave:
    """The note of one rank of one run, in the rank's folder. Any thread."""

    def __init__(self, folder: Path, run_id: str) -> None:
        # The run id of a resumed run comes from a file: it must not become part of a path.
        self.path = folder / f"{_PREFIX}{xxhash.xxh3_64_hexdigest(run_id.encode('utf-8', 'replace'))}{_SUFFIX}"
        self._run_id = run_id
        self._is_gone = False

    def begin(self, rank: int, world_size: int) -> None:
        """Write the note at a fresh start, before anything can be saved. Raises OSError."""
        folder = self.path.parent
        with suppress(FileExistsError):
            folder.mkdir(mode=_DIRECTORY_MODE)
        fsync_dir(folder.parent)
        self._remove_old()
        fd, temp = create_temp(self.path)
        try:
            content = {"run_id": self._run_id, "rank": rank, "world_size": world_size, "inode": os.fstat(fd).st_ino}
            data = json.dumps(content).encode()
            if os.write(fd, data) != len(data):
                raise OSError(f"{self.path}: only part of it could be written")
            os.fsync(fd)
            publish(temp, self.path)
        finally:
            temp.unlink(missing_ok=True)
            os.close(fd)
        fsync_dir(folder)

    def withdraw(self) -> None:
        """Remove the note, durably, before a file is published. Raises OSError: the file must not be published then."""
        if self._is_gone:
            return
        self.path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            fsync_dir(self.path.parent)  # also where another thread has removed it: that one may not have come so far
        self._is_gone = True

    def _remove_old(self) -> None:
        notes = sorted(self.path.parent.glob(f"{_PREFIX}*{_SUFFIX}"), key=lambda path: path.lstat().st_mtime)
        for path in notes[: max(0, len(notes) - _KEPT + 1)]:
            path.unlink(missing_ok=True)


def find_notes(directory: Path) -> Iterator[Note]:
    """The notes under a checkpoint directory that still hold, of all ranks and runs."""
    paths = sorted(directory.glob(f"rank_*/{_PREFIX}*{_SUFFIX}"))
    return (note for path in paths if (note := note_at(path)) is not None)


def note_at(path: Path) -> Note | None:
    """The note at `path`; None: it does not exist, is unreadable, or `FirstSave` has not written it in this place."""
    if not (path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)):
        return None
    try:
        fd = open_regular(path)
        try:
            status = os.fstat(fd)
            content = json.loads(os.read(fd, _MAX_BYTES))
        finally:
            os.close(fd)
        if status.st_uid not in (os.geteuid(), 0, path.parent.stat().st_uid):
            return None
        if not isinstance(content, dict) or content.get("inode") != status.st_ino:
            return None
        run_id, rank, size = content["run_id"], content["rank"], content["world_size"]
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    sound = isinstance(run_id, str) and type(rank) is int and type(size) is int and 0 <= rank < size
    if not sound or path.parent.name != f"rank_{rank}" or "publishing" in content:  # of 0.1: it may have been published
        return None
    return Note(path, run_id, rank, size)
