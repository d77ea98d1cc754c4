"""Fetches batches ahead in a thread, from a loader whose position stays that of what was handed out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from mindx_elastic.data.iteration import Iteration
from mindx_elastic.data.position import whole_number
from mindx_elastic.data.track import fetching
from mindx_elastic.errors import UsageError

__all__ = ["Prefetch", "prefetch"]

_WAIT_S = 0.1


class Prefetch:
    """An iterable over `loader` that holds `num_batches` ready; see `prefetch`."""

    def __init__(self, loader: Any, num_batches: int) -> None:
        self.loader = loader
        self.num_batches = whole_number("num_batches", num_batches, low=1)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        if not isinstance(iterator, Iteration):
            raise UsageError(
                "prefetch() needs a loader that knows its position: name it in the guard and iterate inside of the "
                "block, or wrap it with mindx_elastic.data.from_loader(loader)"
            )
        if not iterator.can_be_read_beside:
            return iterator  # loading draws from the training's streams: it happens in the training thread
        iterator.read_ahead(lambda source: _Reader(source, self.num_batches))
        return iterator


class _Reader(Iterator[Any]):
    """Reads `source` in a thread of its own, at most `ahead` batches."""

    def __init__(self, source: Iterator[Any], ahead: int) -> None:
        self._source = source
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="mindx-prefetch", daemon=True)
        self._started = False

    def _read(self) -> None:
        fetching.add(threading.get_ident())
        try:
            self._fill()
        finally:
            fetching.discard(threading.get_ident())

    def _fill(self) -> None:
        while not self._stop.is_set():
            batch, error = None, None
            try:
                batch = next(self._source)
            except BaseException as problem:  # it belongs to the thread that trains
                error = problem
            while not self._stop.is_set():
                try:
                    self._ready.put((batch, error), timeout=_WAIT_S)
                    break
                except queue.Full:
                    continue
            if isinstance(error, StopIteration) or (error is not None and not isinstance(error, Exception)):
                return

    def __next__(self) -> Any:
        if not self._started:  # after the announcement: nothing is fetched before it
            self._started = True
            self._thread.start()
        if self._ended is not None:
            raise self._ended
        batch, error = self._ready.get()
        if error is None:
            return batch
        if isinstance(error, StopIteration):
            self._ended = error
        raise error

    def close(self, wait_s: float) -> None:
        """End the thread; what it holds is dropped. Waits up to `wait_s` for the batch that is being loaded."""
        self._stop.set()
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(wait_s)


def prefetch(loader: Any, num_batches: int = 2) -> Prefetch:
    """Iterate `loader` with up to `num_batches` fetched ahead by a thread.

    ::

        for epoch in guard.epochs(3):
            for x, y in mx.data.prefetch(loader):
                ...
                guard.step_end()

    A batch counts as handed out when the loop gets it, so a resumed run neither loses nor repeats one, however far the
    thread is ahead. A loader without workers is read in the training thread itself, because loading would draw from the
    random streams that the training uses at that very moment.
    """
    return Prefetch(loader, num_batches)
