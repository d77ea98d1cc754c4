"""The JSON flag file of MindSpore's graceful exit (``train/callback/_on_request_exit.py``): ``{"GracefulExit": 1}``.

A flag asks for *one* stop: the job stops, saves, is started again, and the file still says 1. So the checkpoint of
that stop notes which flags it has answered (`AnsweredFlags`, the header's ``flags``), and a run that goes on from there
takes these very flags as done until they change. Any other counts, also one that was set before the first start.

It is polled by the watcher thread with one `stat` a period; the file is opened only when it has changed. The training
thread never touches it (opening and parsing it costs 11.7 us a step).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import process_started_at
from mindx_elastic.platforms.small_files import parse_json_object, read_text

__all__ = ["AnsweredFlags", "FlagFile"]

_COARSEST_MTIME_S = 2.0
_MOST_KEPT = 32
_CONFIG_MAP_FOLDER = "..data"


class AnsweredFlags:
    """Which flags have stopped this run, and which are set now. Any thread: every step is one operation on a dict."""

    def __init__(self) -> None:
        self._answered: dict[str, None] = {}  # in the order of their answers
        self._set: dict[Path, str] = {}

    @property
    def identities(self) -> tuple[str, ...]:
        """The flags that have been answered, for the header of every file that is written from now on."""
        return tuple(self._answered)

    def take_over(self, identities: Iterable[str]) -> None:
        """What the checkpoint says that the run goes on from."""
        self._answered.update(dict.fromkeys(identities))

    def note(self, path: Path, identity: str | None) -> bool:
        """The flag at `path` is set (None: it is not); whether it has been answered."""
        if identity is None:
            self._set.pop(path, None)
            return False
        self._set[path] = identity
        return identity in self._answered

    def is_set(self, path: Path) -> bool:
        return path in self._set

    @property
    def waiting(self) -> bool:
        """Whether a flag is set that no checkpoint has answered yet."""
        return any(identity not in self._answered for identity in list(self._set.values()))

    def answer(self) -> None:
        """The job stops and saves now, for whatever reason: that answers every flag that was seen set."""
        self.take_over(list(self._set.values()))
        for identity in list(self._answered)[:-_MOST_KEPT]:
            del self._answered[identity]


class FlagFile:
    """Watches one flag file. Used by one thread at a time.

    With `answered` a flag counts unless it has stopped this run before. Without (no file of ours will note the answer)
    one that was set before this process started is stale: it may have ended the run before, and a restart with the same
    command must go on. Either is named once and then ignored until the file changes.
    """

    def __init__(self, path: Path, *, started_at: float | None = None, answered: AnsweredFlags | None = None) -> None:
        self.path = path
        self._answered = answered
        self._started_at = process_started_at() if started_at is None else started_at
        self._seen: tuple[int, int, int] | None = None
        self._warned: str | None = None

    def poll(self) -> bool:
        """Whether the file now asks for a graceful exit. A bad file warns once and is tried again; never raises."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            self._seen = None
            self._note(None)
            return False
        except OSError as error:
            return self._warn(f"cannot be read ({error.strerror})")
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        if identity == self._seen:
            return False
        if not stat.S_ISREG(status.st_mode):
            self._seen = identity
            return self._warn('is not a regular file; put a JSON file {"GracefulExit": 0} there')
        try:
            text, status = read_text(self.path)
            wanted = _wanted(parse_json_object(text))
        except OSError as error:
            return self._warn(f"cannot be read ({error.strerror})")
        except ValueError as error:
            return self._warn(str(error))  # half-written: not marked as seen, so it is read again next time
        self._warned = None
        # A file that was just written may change again without a new time stamp (they are as coarse as 2 s).
        if wanted or abs(time.time() - status.st_mtime) > _COARSEST_MTIME_S:
            self._seen = identity
        if self._answered is not None:
            if self._note(self._identity(text, status) if wanted else None):
                logger.warning(
                    "flag file %s has stopped this run before; it is taken as done until it changes", self.path
                )
                return False
        elif wanted and status.st_mtime < self._started_at:
            logger.warning("flag file %s was set before this start; it is taken as done until it changes", self.path)
            return False
        return wanted

    def _note(self, identity: str | None) -> bool:
        return self._answered is not None and self._answered.note(self.path, identity)

    def _identity(self, text: str, status: os.stat_result) -> str:
        """What makes this setting of the flag another one than the last.

        Content and modification time: setting a flag again writes the file again. Not the inode: a copy that keeps
        its time (rsync, tar, another mount) is the same flag. In a Kubernetes ConfigMap the path and the content: each
        new pod gets new files, and the kubelet touches none whose content is the same.
        """
        digest = xxhash.xxh3_128_hexdigest(text.encode())
        with suppress(OSError):  # no link, or swapped at this moment
            if _CONFIG_MAP_FOLDER in Path(os.readlink(self.path)).parts:
                return f"{digest}/{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.abspath(self.path)))}"
        return f"{digest}@{status.st_mtime_ns}"

    def _warn(self, problem: str) -> bool:
        if problem != self._warned:
            self._warned = problem
            logger.warning("flag file %s %s; it will be read again", self.path, problem)
        return False


def _wanted(content: Mapping[str, Any]) -> bool:
    """Whether the flag is set. Raises ValueError."""
    if "GracefulExit" not in content:
        raise ValueError('has no key "GracefulExit"; expected {"GracefulExit": 1}')
    value = content["GracefulExit"]
    if value not in (0, 1, True, False, "0", "1"):
        raise ValueError(f'has "GracefulExit": {value!r:.60}; expected 0 or 1')
    return value in (1, True, "1")
