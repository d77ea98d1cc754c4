"""What the agents of one attempt tell each other after the training: which ranks one of them has had to end.

The ranks of other nodes may have waited for such a rank in a collective, and now fail through no fault of their own,
although their training is finished. Goes over the store of the attempt's rendezvous; whoever is told nothing in a few
seconds takes a failure for a failure.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mindx_elastic.core.events import logger

__all__ = ["Farewell"]

_T = TypeVar("_T")
_KEY = "mindx/ended_after_training"
_ANSWER_S = 3.0
_MAX_CHARS = 1 << 16


class Farewell:
    """One per attempt, where there are several nodes. Main thread; each call blocks for a few seconds at most."""

    def __init__(self, store: Any, *, world_size: int) -> None:
        """store: torch's, the same for all nodes of this attempt and for no other attempt."""
        self._store, self._world_size = store, world_size

    def tell(self, ranks: Sequence[int]) -> None:
        """These ranks are about to be ended. Before the first signal, so that whoever feels it can know why."""
        self._bounded(lambda: self._store.set(_KEY, json.dumps(list(ranks))), None)

    def heard(self) -> list[int]:
        """The ranks that some node has ended; empty: none, or the store does not answer."""
        text = self._bounded(lambda: self._store.get(_KEY) if self._store.check([_KEY]) else b"", b"")
        try:
            ranks = json.loads(text[:_MAX_CHARS]) if text else []
        except (ValueError, RecursionError):
            return []
        known = isinstance(ranks, list) and all(type(r) is int and 0 <= r < self._world_size for r in ranks)
        return ranks if known else []

    def _bounded(self, work: Callable[[], _T], otherwise: _T) -> _T:
        """The store's machine may be gone, and a call to it has no time-out of its own."""
        box: list[_T] = []

        def run() -> None:
            try:
                box.append(work())
            except Exception as error:
                logger.debug("the store of the rendezvous does not answer: %s: %s", type(error).__name__, error)

        thread = threading.Thread(target=run, name="mindx-farewell", daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return box[0] if box else otherwise
