"""The scheduler's table on disk: one small JSON file, replaced whole, in the folder that MS_RECOVERY_PATH names.

``scheduler.json`` has what `Table.to_json` gives. A scheduler locks ``scheduler.lock`` next to it while it runs, so
that two on one disk cannot serve one job. A file of another user does not count (`core.owners`): with it that user
could give a rank to a process of his own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindx_elastic.config import RankInfo
from mindx_elastic.core.owners import open_trusted
from mindx_elastic.errors import MindxError, UsageError
from mindx_elastic.persist.directory_lock import hold_directory
from mindx_elastic.persist.storage import prepare_owned_directory, remove_stale_temps
from mindx_elastic.platforms.small_files import write_whole

__all__ = ["TABLE_FILE", "TableFile"]

TABLE_FILE = "scheduler.json"
_LOCK_FILE = "scheduler.lock"
_MAX_BYTES = 64 << 20


class TableFile:
    """Of one scheduler. One thread."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, and lock it. Raises UsageError where another scheduler runs in it, or it cannot be used."""
        try:
            self.folder, self._owners = prepare_owned_directory(folder, allow_shared=False)
            self._lock = hold_directory(
                self.folder, RankInfo(), self._owners, grace_s=0.0, file=_LOCK_FILE, other="another scheduler"
            )
        except (MindxError, OSError) as error:
            raise UsageError(f"environment variable MS_RECOVERY_PATH: {error}") from error
        self.path = self.folder / TABLE_FILE
        remove_stale_temps(self.folder)

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
            f"{self.path}: not the table of a scheduler ({why}). Move it away to form the cluster again, when the "
            "workers of the old one have ended (kill -TERM: they save); checkpoints are not touched by that"
        )

    def write(self, content: dict[str, Any]) -> None:
        """Replace the table. Raises SaveError."""
        write_whole(self.path, json.dumps(content, indent=1).encode())

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
