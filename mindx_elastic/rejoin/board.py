"""The board of an in-place recovery: notes of the ranks and the coordinator in the job's store.

Keys, under one prefix for each attempt of the agent:

======================  ================================================================================================
``{g}/plan``            generation `g` begins; or why there is no recovery
``{g}/out/{rank}``      a survivor's report, or that it is dead (`protocol.Report`)
``{g}/state``           the donor's word that its state is in shared memory, or why it does not
``{g}/ready/{rank}``    a rank trains again
``{g}/gloo/...``        what the new connections need
======================  ================================================================================================

A note is written once: the first writer wins, and all read the same. All notes but those of gloo are sealed where the
job has a key (`agreement.sealed`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.gather import Store
from mindx_elastic.agreement.job_key import read_key_file
from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.config import KeySettings
from mindx_elastic.core.events import logger

__all__ = ["Board", "board_key"]

_MOST_CHARACTERS = 1 << 20
_ASK_AGAIN_S, _MOST_PAUSE_S = 0.0005, 0.004
_SHARE_OF_WAIT = 0.05
"""A pause is that much of the wait so far: what comes after 20 ms is seen within 1 ms."""


def board_key() -> bytes | None:
    """The key that notes are sealed with; None: the job has none. Raises UsageError."""
    settings = KeySettings.from_env()
    if settings.text:
        return settings.text.encode()
    if settings.file is not None:
        return read_key_file(Path(settings.file), "environment variable MINDX_JOB_KEY_FILE")
    return None


class Board:
    """One side's view of one attempt's board. One thread at a time; raises what a lost store raises."""

    def __init__(self, store: Store, *, key: bytes | None, scope: str, writer: int) -> None:
        """`store`: a connection of this user's own. `scope`: the same on all sides. `writer`: the rank; the coordinator
        takes the number after the last rank."""
        self._store, self._seal = store, Seal(key, f"rejoin/{scope}", writer)
        self._warned: set[str] = set()

    def write(self, key: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Write a note unless there is one; returns the note that counts. Raises NotOursError."""
        text = self._seal.close(key, json.dumps(content, separators=(",", ":")))
        return self._open(key, self._store.compare_set(key, "", text))

    def refuse(self, generation: int, rank: int, reason: str) -> None:
        """Tell the coordinator why `rank` does not go on. Raises NotOursError."""
        self.write(f"{generation}/refusal", {"rank": rank, "refusal": reason})

    def read(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The notes that are there, by key, now."""
        there = [key for key in keys if self._store.check([key])]
        return {key: self._open(key, text) for key, text in zip(there, self._store.multi_get(there), strict=True)}

    def has(self, keys: Iterable[str]) -> bool:
        """Whether there is something for all of `keys`."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]] | None:
        """Wait for all `keys`; None: the time is over.

        Asks again and again: a wait of torch's that times out prints a warning in C++.
        """
        began = time.monotonic()
        while not self._store.check(list(keys)):
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                return None
            time.sleep(min(max(_ASK_AGAIN_S, _SHARE_OF_WAIT * waited_s), _MOST_PAUSE_S))
        return {key: self._open(key, text) for key, text in zip(keys, self._store.multi_get(list(keys)), strict=True)}

    def _open(self, key: str, message: bytes | str) -> dict[str, Any]:
        try:
            content = json.loads(self._seal.open(key, message, limit=_MOST_CHARACTERS))
        except (ValueError, RecursionError) as error:
            if key not in self._warned:
                self._warned.add(key)
                logger.warning("the store's %s is not a note of this job's: %s", key, error)
            raise error if isinstance(error, NotOursError) else NotOursError(str(error)) from None
        if not isinstance(content, dict):
            raise NotOursError(f"{key} holds no note")
        return content
