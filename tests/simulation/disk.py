"""A disk that loses its power: what POSIX promises of it, and no more.

A file's bytes are on disk only as of its last `fsync`; an entry of a directory (a file, a folder, a new name) only as
of the last `fsync` of that directory. `Disk` stands beside a real directory tree and notes what is flushed while it is
active. `check` insists that a path would still lead to the same bytes after a cut at this moment; `cut` makes one of
the trees that a cut may leave.
"""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

__all__ = ["Disk"]

Node = tuple[int, int]
"""Device and inode."""
_SECTOR = 512


class Disk:
    """What lies below `root` when it is made counts as durable. One process, any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.calls: list[str] = []
        """For a failing test: what was made and flushed, in order."""
        self.before: Callable[[str], None] = lambda call: None
        """Is told of each call that changes the disk, before it is made."""
        self.lies = False
        """A flush keeps nothing, and says nothing of it."""
        self._names: dict[Node, dict[str, Node]] = {}
        self._content: dict[Node, bytes] = {}
        """As of their last flush; a folder's entries, and a file's bytes."""
        for folder, _, files in os.walk(self.root):
            self._names[_node(os.stat(folder))] = _entries(folder)
            for name in files:
                path = Path(folder, name)
                self._content[_node(os.lstat(path))] = path.read_bytes()

    @contextmanager
    def active(self) -> Iterator[Disk]:
        """The calls of this process are noted."""
        with ExitStack() as stack:
            for name in ("fsync", "mkdir", "rename", "replace", "link", "unlink", "pwrite", "write"):
                note = self._note(name, getattr(os, name))
                stack.enter_context(patch.object(os, name, note))
                accessor = getattr(pathlib, "_NormalAccessor", None)
                if accessor is not None and hasattr(accessor, name):  # Python 3.10 keeps its own references
                    stack.enter_context(patch.object(accessor, name, staticmethod(note)))
            yield self

    def _note(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(what: Any, *more: Any, **options: Any) -> Any:
            self.before(name)
            result = call(what, *more, **options)
            if name == "fsync":
                self._flush(what)
            elif name == "mkdir":
                self.calls.append(f"mkdir {what}")
            return result

        return noted

    def _flush(self, fd: int) -> None:
        status = os.fstat(fd)
        self.calls.append(f"fsync {os.readlink(f'/proc/self/fd/{fd}')}")
        if self.lies:
            return
        if stat.S_ISDIR(status.st_mode):
            self._names[_node(status)] = _entries(fd)
        else:
            self._content[_node(status)] = Path(f"/proc/self/fd/{fd}").read_bytes()

    # --- what a cut leaves ---

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
        if stat.S_ISREG(status.st_mode) and self._content.get(_node(status)) != at.read_bytes():
            return f"{at}: its bytes were never flushed"
        return None

    def check(self, path: Path) -> None:
        """Insist that `path` survives."""
        problem = self.lost(path)
        assert problem is None, "\n".join([problem, *self.calls])

    def cut(self, target: Path, random: Random) -> None:
        """Make in the folder `target` a tree that a power cut at this moment may leave: of each name the entry that was
        flushed or the newer one, of each file the bytes that were flushed, the newer ones, or a mixture."""
        now = {_node(os.stat(folder)): Path(folder) for folder, _, _ in os.walk(self.root)}
        files = {_node(os.lstat(path)): path for path in self.root.rglob("*") if path.is_file()}

        def make(node: Node, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            flushed, newer = self._names.get(node, {}), _entries(now[node]) if node in now else {}
            for name in sorted({*flushed, *newer}):
                found = random.choice((flushed, newer)).get(name)
                if found is None:
                    continue
                if found in now or found in self._names:
                    make(found, folder / name)
                else:
                    newest = files[found].read_bytes() if found in files else self._content.get(found, b"")
                    (folder / name).write_bytes(_torn(self._content.get(found, b""), newest, random))

        make(_node(os.stat(self.root)), target)


def _torn(flushed: bytes, newest: bytes, random: Random) -> bytes:
    if flushed == newest:
        return newest
    size = random.choice((len(flushed), len(newest), random.randint(0, max(len(flushed), len(newest)))))
    if (kind := random.random()) < 0.6:
        return (newest if kind < 0.3 else flushed)[:size].ljust(size, b"\0")
    old, new = flushed.ljust(size, b"\0"), newest.ljust(size, b"\0")
    sectors = range(0, size, _SECTOR)
    return b"".join(random.choice((old, new))[start : start + _SECTOR] for start in sectors)[:size]


def _entries(folder: Any) -> dict[str, Node]:
    return {entry.name: _node(entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)}


def _node(status: os.stat_result) -> Node:
    return status.st_dev, status.st_ino
