"""One pass over a loader: hands out batches, moves the position, and ends the workers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mindx_elastic.data.position import Cursor
from mindx_elastic.data.track import LoaderMark, fetching
from mindx_elastic.data.workers import end_workers, open_iterator
from mindx_elastic.errors import UsageError

__all__ = ["Engine", "EngineLoader", "Iteration", "at_unfollowed"]

_SHUTDOWN_GRACE_S = 0.5

Progress = Callable[[int], "tuple[int, bool]"]

at_unfollowed: list[Callable[[Iteration], None]] = []
"""Called in the thread that asks, before each batch of a loader that no guard follows."""


class Iteration(Iterator[Any]):
    """Iterator over the batches of one epoch. Only a batch that the caller gets moves the position: prefetched ones
    do not count.

    `progress(n)` is (samples consumed, no batch is left) after n batches of this iteration. `announce` runs once,
    before the first batch is fetched; `check` runs before each one is asked for, and may raise. `shared` says that
    persistent workers, which outlive it, make the batches. Training thread only.
    """

    def __init__(
        self,
        cursor: Cursor,
        batches: Iterator[Any],
        *,
        loader: Any,
        progress: Progress,
        announce: Callable[[], None] | None,
        shared: bool,
        check: Callable[[], None] | None,
    ) -> None:
        self._cursor = cursor
        self.loader: weakref.ref[Any] = weakref.ref(loader)
        self._token = cursor.token
        self._batches: Iterator[Any] | None = batches
        self._progress = progress
        self._announce = announce
        self._shared = shared
        self._check = check
        self._count = 0
        self._stopped = False
        self.outdated: Callable[[], None] | None = None
        """Called before each batch of an iterator that was made before its guard was entered."""

    def __next__(self) -> Any:
        batches = self._batches
        if batches is None:
            if self._stopped:
                raise UsageError(
                    "the loader was shut down; make a new iterator with iter(loader); in a program with guard.run, "
                    "make iterators and generators over it inside of the function"
                )
            raise StopIteration
        if self.outdated is not None:
            self.outdated()
        if self._check is not None:
            self._check()
        if self._shared and self._token != self._cursor.token:
            raise UsageError("a newer iterator of this loader uses its persistent workers; this one has ended")
        if self._announce is not None:
            announce, self._announce = self._announce, None
            announce()
        track = self._cursor.track
        thread = threading.get_ident()
        is_nested = thread in fetching  # in the data set of another loader
        if track is not None:
            track.ask()
        elif at_unfollowed and not is_nested:
            for see in at_unfollowed:
                see(self)
        if not is_nested:
            fetching.add(thread)
        try:
            batch = next(batches)
        except StopIteration:
            self._end(exhausted=True)
            raise
        except Exception:
            # The batch is gone (torch goes on with the next one): a caller who carries on must find it counted.
            self._advance()
            raise
        finally:
            if not is_nested:
                fetching.discard(thread)
        if track is not None:
            track.see(batch)
        self._advance()
        return batch

    def _advance(self) -> None:
        self._count += 1
        samples, finished = self._progress(self._count)
        self._cursor.advance(self._token, samples, finished)

    def _end(self, *, exhausted: bool) -> None:
        if self._batches is not None:
            self._batches = None  # torch ends the workers that are not persistent
            self._cursor.end(self._token, exhausted=exhausted)

    def stop(self) -> None:
        """End the workers now; from then on asking for a batch is an error."""
        self._stopped = True
        inner = getattr(self._batches, "wrapped", self._batches)
        if not getattr(inner, "_persistent_workers", False):
            end_workers(inner, grace_s=_SHUTDOWN_GRACE_S)
        self._end(exhausted=False)

    def __del__(self) -> None:
        if getattr(self, "_batches", None) is not None:  # not there when __init__ failed
            self._end(exhausted=False)


class Engine:
    """What both loaders share: the cursor, the iteration under way, the persistent workers."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        self._live: weakref.ref[Iteration] | None = None  # weak: dropping the iterator must end it at once
        self.at_overlap: Callable[[], None] | None = None
        """Called when an iterator is asked for a batch after a newer one has begun: a position has one place."""
        # For persistent workers only:
        self._torch_loader: Any = None
        self._torch_iterator: Any = None

    def open(self, build: Callable[[], Any], *, persistent: bool) -> Iterator[Any]:
        """A torch iterator over `build()`.

        With persistent workers `build` is called the first time only; the workers are kept here.
        """
        if not persistent:
            return open_iterator(build())
        if self._torch_iterator is None:
            self._torch_loader = build()
            self._torch_iterator = open_iterator(self._torch_loader)
        else:
            iter(self._torch_loader)  # resets the same iterator; no process is started
        return self._torch_iterator  # type: ignore[no-any-return]

    def iterate(
        self,
        batches: Iterator[Any],
        *,
        loader: Any,
        progress: Progress,
        announce: Callable[[], None] | None,
        check: Callable[[], None] | None = None,
    ) -> Iteration:
        shared = batches is self._torch_iterator
        iteration = Iteration(
            self.cursor,
            batches,
            loader=loader,
            progress=progress,
            announce=announce,
            shared=shared,
            check=check,
        )
        if (older := self.live) is not None and self.at_overlap is not None:
            older.outdated = self.at_overlap
        self._live = weakref.ref(iteration)
        if (track := self.cursor.track) is not None and track.at_opened is not None:
            track.at_opened()
        return iteration

    @contextmanager
    def set_aside(self, loader: Any) -> Iterator[None]:
        """Inside, `loader` (the owner of this engine) can be iterated as if it were another object: the position, an
        iteration under way and persistent workers are as before afterwards. Training thread."""
        ready, loader.on_iterator_ready = loader.on_iterator_ready, None
        before = self._live, self._torch_loader, self._torch_iterator
        self._live = self._torch_loader = self._torch_iterator = None
        try:
            with self.cursor.set_aside():
                yield
        finally:
            self._live, self._torch_loader, self._torch_iterator = before
            loader.on_iterator_ready = ready

    @property
    def live(self) -> Iteration | None:
        """The newest iterator, if it still exists."""
        return self._live() if self._live is not None else None

    def shutdown(self) -> None:
        iteration = self.live
        if iteration is not None:
            iteration.stop()
        iterator = self._torch_iterator
        self._torch_loader = self._torch_iterator = None
        end_workers(iterator, grace_s=_SHUTDOWN_GRACE_S)


class EngineLoader:
    """A loader of ours: its engine has the position."""

    _engine: Engine
    on_iterator_ready: Callable[[], None] | None
    """Called once an iteration, when the worker iterator exists and the first batch has not been fetched."""
    _takes_first_seed = False
    """Whether it takes over the seed of the run that it resumes, in place of a refusal: it was made for a program that
    has chosen none."""

    @property
    def epoch(self) -> int:
        """Epoch of the running iteration, or else of the next one."""
        return self._engine.cursor.next_epoch

    @property
    def is_last(self) -> bool:
        """Whether the batch that was handed out last is its epoch's last one; False where only the end tells."""
        return self._engine.cursor.is_at_end

    def state_dict(self) -> dict[str, Any]:
        """The position, a new dict each time; call it every step. What a replaying loader needs to begin the epoch
        again, about 10 KB of arrays, the dicts of one epoch share: do not change those in place."""
        return self.state_at(self._engine.cursor)

    def state_at(self, at: LoaderMark | Cursor, later: Sequence[LoaderMark] = ()) -> dict[str, Any]:
        """The same for an earlier position. `later`: those after it, up to the present one."""
        raise NotImplementedError

    def set_aside(self) -> AbstractContextManager[None]:
        """A block in which this loader can be iterated (an evaluation on the training data) without any effect on its
        position and on an iteration under way. Inside, each ``iter()`` is a whole epoch, the first one in the order of
        the present epoch. `Guard.outside_step` has it around it."""
        return self._engine.set_aside(self)

    def shutdown(self) -> None:
        """End the worker processes now: ask, wait half a second, SIGKILL.

        Idempotent; any thread, but not two at once.
        """
        self._engine.shutdown()

    def _announce(self) -> None:
        if self.on_iterator_ready is not None:
            self.on_iterator_ready()
