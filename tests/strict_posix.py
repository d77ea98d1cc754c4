"""What a power cut leaves in the strictest file system that POSIX allows.

A file's bytes are on disk only as of its last `fsync`; an entry of a directory (a file, a folder, a new name) only as
of the last `fsync` of that directory. `StrictDisk` stands beside a real directory tree and notes what is flushed while
it is active; `check` insists that a path would still lead to the same bytes after a cut at this moment.
"""

from __future__ import annotations

import os
import pathlib
import stat
from pathlib import Path
from typing import Any

import pytest

__all__ = ["StrictDisk"]

Node = tuple[int, int]
"""Device and inode."""


class StrictDisk:
    """What lies below `root` when it is made counts as durable. One process, any thread."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root.resolve()
        self.calls: list[str] = []
        """For a failing test: what was made and flushed, in order."""
        self._names: dict[Node, dict[str, Node]] = {}
        self._content: dict[Node, tuple[int, int]] = {}
        for folder, _, files in os.walk(self.root):
            self._names[_node(os.stat(folder))] = _entries(folder)
            for name in files:
                status = os.lstat(Path(folder, name))
                self._content[_node(status)] = _version(status)
        self._fsync, self._mkdir = os.fsync, os.mkdir
        monkeypatch.setattr(os, "fsync", self._note_fsync)
        monkeypatch.setattr(os, "mkdir", self._note_mkdir)
        if accessor := getattr(pathlib, "_NormalAccessor", None):  # Python 3.10 keeps its own reference
            monkeypatch.setattr(accessor, "mkdir", self._note_mkdir)

    def _note_fsync(self, fd: int) -> None:
        self._fsync(fd)
        status = os.fstat(fd)
        self.calls.append(f"fsync {os.readlink(f'/proc/self/fd/{fd}')}")
        if stat.S_ISDIR(status.st_mode):
            self._names[_node(status)] = _entries(fd)
        else:
            self._content[_node(status)] = _version(status)

    def _note_mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._mkdir(path, *args, **kwargs)
        self.calls.append(f"mkdir {path}")

    def make_without_flush(self, folder: Path) -> None:
        """What a process that is killed, or another rank, has made a moment ago."""
        self._mkdir(folder)

    def lost(self, path: Path) -> str | None:
        """Why `path` would not be there, or not whole, after a power cut now; None: it survives."""
        path = Path(os.path.abspath(path))
        at = self.root
        for part in path.relative_to(self.root).parts:
            known = self._names.get(_node(os.stat(at)), {}).get(part)
            now = _node(os.lstat(at / part))
            if known != now:
                return f"{at / part}: its entry in {at} was never flushed"
            at = at / part
        status = os.lstat(at)
        if stat.S_ISREG(status.st_mode) and self._content.get(_node(status)) != _version(status):
            return f"{at}: its bytes were never flushed"
        return None

    def check(self, path: Path) -> None:
        """Insist that `path` survives."""
        problem = self.lost(path)
        assert problem is None, "\n".join([problem, *self.calls])


def _entries(folder: Any) -> dict[str, Node]:
    return {entry.name: _node(entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)}


def _node(status: os.stat_result) -> Node:
    return status.st_dev, status.st_ino


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
