"""Proves that a rank has never saved anything, so that a first save that was cut off may begin anew.

Where ranks are not replicas, a step is complete only when every rank has its file. After a power cut in the very first
save one rank has a file and another has none. A complete step of which a disk was lost looks the same. The first case
may begin anew, the second must not. A note "this rank has saved" would not help: it may be lost together with the file.
So the note says the opposite: at a fresh start each rank durably writes "this rank has never published a file", and
removes the note before it publishes its first file. A note that still exists is the proof. A lost disk, a deleted
folder or a full disk can only lose the proof.

Removing the note and publishing the file are two steps, and the power may fail between them. So the note is first
replaced by one that names the finished temporary file: while the temporary name exists, the file is not published.
Order, each step durable before the next: the temporary file and its name; the note that names it; the rename. The note
is removed when the file is durable. `settle` reads the note before old temporary files are deleted.

A note records its own inode number, so that a copy of it (in a backup) proves nothing.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mindx_elastic.core.posix import open_regular
from mindx_elastic.persist.storage import create_temp, fsync_dir, publish

__all__ = ["FirstSave", "Note", "find_notes", "note_at", "notes_in", "settle"]

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
    publishing: Path | None = None
    """The finished temporary file that the rank was about to publish."""

    @property
    def holds(self) -> bool:
        """Whether it proves that this rank has never published a file."""
        return self.publishing is None or os.path.lexists(self.publishing)

    def touch(self) -> None:
        """Make it younger than the other notes of its folder, so that it is kept longer."""
        with suppress(OSError):
            os.utime(self.path)


class FirstSave:
    """The note of one rank of one run, in the rank's folder. Any thread; two saves may run at once."""

    def __init__(self, folder: Path, run_id: str) -> None:
        # The run id of a resumed run comes from a file: it must not become part of a path.
        self.path = folder / f"{_PREFIX}{xxhash.xxh3_64_hexdigest(run_id.encode('utf-8', 'replace'))}{_SUFFIX}"
        self._run_id = run_id
        self._lock = threading.Lock()
        self._open = True
        self._busy = False

    def note(self) -> Note | None:
        """The note as it is on disk; None: there is none, or it is not of this run."""
        note = _read(self.path)
        return note if note is not None and note.run_id == self._run_id else None

    def begin(self, rank: int, world_size: int) -> None:
        """Write the note at a fresh start, before anything can be saved. Raises OSError."""
        folder = self.path.parent
        with suppress(FileExistsError):
            folder.mkdir(mode=_DIRECTORY_MODE)
        fsync_dir(folder.parent)
        self._remove_old()
        self._write(Note(self.path, self._run_id, rank, world_size))

    def before_publish(self, temp: Path) -> None:
        """Call it when the finished, flushed file `temp` is about to be published. Raises OSError when the note cannot
        be removed: the file must not be published then."""
        with self._lock:
            if not self._open:
                return
            note = None if self._busy else _read(self.path)  # two saves at once: a note cannot name both files
            self._busy = True
            try:
                if note is not None:
                    fsync_dir(temp.parent)
                    self._write(Note(self.path, note.run_id, note.rank, note.world_size, temp))
                    return
            except OSError:  # a full disk: save without the proof
                pass
            self._withdraw()

    def after_publish(self) -> None:
        """Call it when a file is durable under its name: removes the note."""
        with self._lock:
            if self._open:
                self._open = False
                with suppress(OSError):  # the temporary file that it names is gone: the note proves nothing any more
                    self.path.unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Remove the note, durably. Raises OSError."""
        with self._lock:
            if self._open:
                self._withdraw()

    def _withdraw(self) -> None:
        try:
            self.path.unlink()
        except FileNotFoundError:
            pass
        else:
            fsync_dir(self.path.parent)
        self._open = False

    def _write(self, note: Note) -> None:
        fd, temp = create_temp(self.path)
        try:
            content: dict[str, Any] = {"run_id": note.run_id, "rank": note.rank, "world_size": note.world_size}
            content["inode"] = os.fstat(fd).st_ino
            if note.publishing is not None:
                content["publishing"] = os.path.relpath(note.publishing, self.path.parent)
            data = json.dumps(content).encode()
            if os.write(fd, data) != len(data):
                raise OSError(f"{self.path}: only part of it could be written")
            os.fsync(fd)
            publish(temp, self.path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        fsync_dir(self.path.parent)

    def _remove_old(self) -> None:
        notes = sorted(self.path.parent.glob(f"{_PREFIX}*{_SUFFIX}"), key=lambda path: path.lstat().st_mtime)
        for path in notes[: max(0, len(notes) - _KEPT + 1)]:
            path.unlink(missing_ok=True)


def find_notes(directory: Path) -> Iterator[Note]:
    """The notes under a checkpoint directory that still hold, of all ranks and runs."""
    for folder in sorted(directory.glob("rank_*")):
        yield from notes_in(folder)


def notes_in(folder: Path) -> Iterator[Note]:
    """The notes in a rank's folder that still hold."""
    return (note for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")) if (note := note_at(path)) is not None)


def note_at(path: Path) -> Note | None:
    """The note at `path`; None: the file is not a note, or does not hold any more."""
    if not (path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)):
        return None
    note = _read(path)
    return note if note is not None and note.holds else None


def settle(folder: Path) -> None:
    """Settle the notes of `folder`'s rank before its left-over temporary files are deleted.

    A note that names a temporary file becomes a plain one again: nothing was saved. A note whose file was published is
    deleted. Raises nothing: a note that cannot be written only proves less.
    """
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        note = _read(path)
        if note is not None and note.publishing is None:
            continue
        with suppress(OSError):
            if note is None or not note.holds:
                path.unlink(missing_ok=True)
            else:
                FirstSave(folder, note.run_id)._write(Note(path, note.run_id, note.rank, note.world_size))


def _read(path: Path) -> Note | None:
    """Read a note; None: it does not exist, is unreadable, or `FirstSave` has not written it in this place."""
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
        publishing = content.get("publishing")
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    sound = isinstance(run_id, str) and type(rank) is int and type(size) is int and 0 <= rank < size
    if not sound or path.parent.name != f"rank_{rank}" or not isinstance(publishing, str | None):
        return None
    return Note(path, run_id, rank, size, None if publishing is None else path.parent / publishing)
