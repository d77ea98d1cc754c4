"""The scheduler's table on disk: one small JSON file, replaced whole, in the folder that MS_RECOVERY_PATH names.

``scheduler.json`` has what `Table.to_json` gives. A scheduler holds a lock on ``scheduler.lock`` next to it while it
runs, so that two on one disk cannot serve one job. A file of another user does not count (`core.owners`): with it that
user could give a rank to a process of his own.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindx_elastic.core.owners import open_trusted
from mindx_elastic.core.posix import open_regular
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import MindxError, UsageError
from mindx_elastic.persist.storage import prepare_owned_directory, remove_stale_temps
from mindx_elastic.platforms.small_files import write_whole

__all__ = ["TABLE_FILE", "TableFile"]

TABLE_FILE = "scheduler.json"
_LOCK_FILE = "scheduler.lock"
_MAX_BYTES = 64 << 20
_MAX_NAME_BYTES = 200
_LOCK_S = 5.0  # a predecessor that was killed a moment ago may not be quite gone


class TableFile:
    """Of one scheduler. One thread."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, and lock it. Raises UsageError where another scheduler runs in it, or it cannot be used."""
        try:
            self.folder, self._owners = prepare_owned_directory(folder, allow_shared=False)
            self.path = self.folder / TABLE_FILE
            self._lock = open_regular(self.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except (MindxError, OSError) as error:
            raise UsageError(f"environment variable MS_RECOVERY_PATH: {error}") from error
        try:
            self._take_lock()
        except BaseException:
            os.close(self._lock)
            raise
        remove_stale_temps(self.folder)

    def _take_lock(self) -> None:
        end = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(OSError):  # a full disk: the lock works without it
                    os.ftruncate(self._lock, 0)
                    os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    who = printable(os.pread(self._lock, _MAX_NAME_BYTES, 0).decode("utf-8", "replace"))
                    raise UsageError(
                        f"environment variable MS_RECOVERY_PATH={self.folder}: another scheduler runs there "
                        f"({who or 'its name cannot be read'}). If it is this job's, and hangs or is stopped, end it "
                        "first; else give each job its own folder"
                    ) from None
            except OSError:
                return  # a file system without locks
            time.sleep(0.05)

    def read(self) -> dict[str, Any] | None:
        """The table that was written last; None: there is none. Raises UsageError for a file that does not count."""
        try:
            with open(open_trusted(self.path, self._owners), "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except (MindxError, OSError) as error:
            raise UsageError(f"{self.path}: the scheduler's table cannot be read: {error}") from error
        try:
            content = json.loads(data) if len(data) <= _MAX_BYTES else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise self.damaged("no JSON object")
        return content

    def damaged(self, why: str) -> UsageError:
        """The error for a table that makes no sense."""
        return UsageError(
            f"{self.path}: not the table of a scheduler ({why}). Move it away to form the cluster again; checkpoints "
            "are not touched by that"
        )

    def write(self, content: dict[str, Any]) -> None:
        """Replace the table. Raises SaveError."""
        write_whole(self.path, json.dumps(content, indent=1).encode())

    def close(self) -> None:
        os.close(self._lock)
