"""Runs a user's script in this process as ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS`` would.

::

    python -m mindx_elastic.prove.script SCRIPT ARGUMENTS

Notes what `prove` must know of the script in a file: what it opens for writing, and an exception that it ends with.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindx_elastic.config import MemorySettings, ProveSettings
from mindx_elastic.core.script import run
from mindx_elastic.errors import UsageError
from mindx_elastic.prove.control import read_control

__all__ = ["NOTES_FILE", "listen", "main"]

NOTES_FILE = "script.jsonl"
"""In the run's folder."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_NOT_FILES = ("/dev/", "/proc/", "/sys/")


def main() -> None:
    """Entry point of a fresh interpreter; see the module."""
    listen()
    run(sys.argv[1:])


def listen() -> None:
    """Note what the script does from here on. Once a process, before the script."""
    control = ProveSettings.from_env().control
    if control is None:
        raise UsageError("this module is started by mindx-elastic prove")
    notes = read_control(control).folder / NOTES_FILE
    fd = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    sys.addaudithook(_Listener(fd, notes.parent.parent).hear)


class _Listener:
    """Hears of what Python opens, renames and removes, of an exception that ends the script, and of what `torch.save`
    does, which opens its files in C++. In each thread, and in processes that are forked."""

    def __init__(self, fd: int, own: Path) -> None:
        """`own`: the folder of the whole proof."""
        folders = tempfile.gettempdir(), own, MemorySettings.from_env().base or own
        temporary = {os.path.realpath(folder) for folder in folders}
        self._fd, self._others = fd, (*(f"{folder}/" for folder in temporary), *_NOT_FILES)
        self._seen: set[str] = set()
        self._hears_torch = self._listen_to_torch()

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES:
                self._note_path(path)
        elif event in ("os.remove", "os.rename", "os.mkdir"):
            self._note_path(arguments[1] if event == "os.rename" else arguments[0])
        elif event == "import" and not self._hears_torch:  # one of those that follow torch's own
            self._hears_torch = self._listen_to_torch()
        elif event == "sys.excepthook":
            kind, rank = arguments[1].__name__, os.environ.get("RANK", "0")
            with suppress(Exception):  # the text is the program's
                _note(self._fd, "error", type=kind, text=str(arguments[2]), rank=rank)

    def _listen_to_torch(self) -> bool:
        """Returns whether it was possible: torch's module is there."""
        writer: Any = getattr(sys.modules.get("torch.serialization"), "_open_zipfile_writer_file", None)
        if writer is None:
            return False
        original = writer.__init__

        @functools.wraps(original)
        def init(opened: Any, name: Any, *arguments: Any, **more: Any) -> None:
            self._note_path(name)
            original(opened, name, *arguments, **more)

        writer.__init__ = init
        return True

    def _note_path(self, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        text = os.path.realpath(os.fsdecode(path))
        is_own = f"{text}/".startswith(self._others) or "__pycache__" in text
        if not is_own and text not in self._seen:
            self._seen.add(text)
            _note(self._fd, "write", text=text)


def _note(fd: int, kind: str, **content: str) -> None:
    with suppress(OSError):  # the script has closed all descriptors
        os.write(fd, json.dumps({"kind": kind, **content}).encode() + b"\n")


if __name__ == "__main__":
    main()
