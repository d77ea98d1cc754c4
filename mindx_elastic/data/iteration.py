"""One pass over a loader: hands out batches, moves the position, and ends the workers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mindx_elastic.data.position import Cursor, check_numbers, check_streams, check_unchanged
from mindx_elastic.data.random_streams import VERSION
from mindx_elastic.data.track import LoaderMark, fetching
from mindx_elastic.data.workers import end_workers, open_iterator
from mindx_elastic.errors import UsageError

__all__ = ["CursorLoader", "Iteration", "Opened", "at_unfollowed"]

_SHUTDOWN_GRACE_S = 0.5

at_unfollowed: list[Callable[[Iteration], None]] = []
"""Called in the thread that asks, before each batch of a loader that no guard follows."""


class Opened(NamedTuple):
    """What a loader begins an iteration with."""

    batches: Iterator[Any]
    progress: Callable[[int], tuple[int, bool]]
    """(samples consumed, no batch is left) after so many batches of this iteration."""
    announce: Callable[[], None] | None
    """Runs once, before the first batch is fetched."""


class Iteration(Iterator[Any]):
    """Iterator over the batches of one epoch. Only a batch that the caller gets moves the position: prefetched ones
    do not count. Training thread only.
    """

    def __init__(self, loader: CursorLoader, opened: Opened, *, is_shared: bool) -> None:
        """`is_shared`: persistent workers, which outlive it, make the batches."""
        self.loader: weakref.ref[Any] = weakref.ref(loader)
        self._cursor = loader._cursor
        self._token = self._cursor.token
        self._batches: Iterator[Any] | None = opened.batches
        self._progress, self._announce, self._check_order = opened.progress, opened.announce, loader._check_order
        self._is_shared = is_shared
        self._count = 0
        self._stopped = False

    def __next__(self) -> Any:
        batches = self._batches
        if batches is None:
            if self._stopped:
                raise UsageError(
                    "the loader was shut down; make a new iterator with iter(loader); in a program with guard.run, "
                    "make iterators and generators over it inside of the function"
                )
            raise StopIteration
        if self._token != self._cursor.token:
            if self._cursor.at_older is not None:
                self._cursor.at_older()
            if self._is_shared:
                raise UsageError("a newer iterator of this loader uses its persistent workers; this one has ended")
        self._check_order()
        if self._announce is not None:
            announce, self._announce = self._announce, None
            announce()
        track = self._cursor.track
        thread = threading.get_ident()
        is_nested = thread in fetching  # in the data set of another loader
        if track is not None:
            track.is_asked()
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
            track.has_made(batch)
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


class CursorLoader:
    """A loader of ours: the cursor has its position."""

    _form: str
    """In its state."""
    seed: int
    on_iterator_ready: Callable[[], None] | None
    """Called once an iteration, when the worker iterator exists and the first batch has not been fetched."""
    _has_ends = True
    """Whether its epochs end."""
    worker_grace_s: float | None = None
    """Seconds that a signalled worker may live on; None: the environment's grace period."""
    _takes_first_seed = False
    """Whether it takes over the seed of the run that it resumes, in place of a refusal: it was made for a program that
    has chosen none."""

    def _set_up(self) -> None:
        self.on_iterator_ready = None
        self._cursor = Cursor()
        self._live: weakref.ref[Iteration] | None = None  # weak: dropping the iterator must end it at once
        self._settings: dict[str, Any] | None = None
        self._made_with: tuple[Any, ...] = ()  # as `_order` was
        # For persistent workers only:
        self._torch_loader: Any = None
        self._torch_iterator: Any = None

    @property
    def epoch(self) -> int:
        """Epoch of the running iteration, or else of the next one."""
        return self._cursor.next_epoch

    @property
    def is_last(self) -> bool:
        """Whether the batch that was handed out last is its epoch's last one; False where only the end tells."""
        return self._cursor.is_at_end

    @property
    def _foresees_end(self) -> bool:
        """Whether `is_last` says so."""
        return self._has_ends

    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError

    def _move_on(self) -> None:
        """As after the last batch of the loaded epoch."""
        self.set_epoch(self._cursor.epoch + 1)

    def _end_loaded(self) -> None:
        """The loaded epoch is over, and is still the present one: an evaluation goes through it."""
        self._cursor.pending = not self._cursor.is_at_end

    # --- an iteration ---

    def __iter__(self) -> Iterator[Any]:
        cursor = self._cursor
        cursor.begin()
        try:
            opened = self._begin()
        except BaseException:
            cursor.abandon()
            raise
        iteration = Iteration(self, opened, is_shared=opened.batches is self._torch_iterator)
        self._live = weakref.ref(iteration)
        if cursor.track is not None:
            cursor.track.iteration_is_open()
        return iteration

    def _begin(self) -> Opened:
        """What the cursor's epoch has left."""
        raise NotImplementedError

    def _order(self) -> tuple[Any, ...]:
        """What the program may set later, and no position covers: batch size, shuffle, drop_last."""
        return ()

    def _check_order(self) -> None:
        """Raise UsageError where the program has set others than the loader was made with."""
        if (now := self._order()) != self._made_with:
            raise UsageError(
                f"batch_size, shuffle and drop_last of the loader were set from {self._made_with} to {now} after it "
                "was made; no position covers that. Go on with the first, several batches a step for a larger one, or "
                "make a loader for each, Guard(loader=[first, second]): the saved steps go on"
            )

    def _open(self, build: Callable[[], Any], *, persistent: bool) -> Iterator[Any]:
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

    def _announce(self) -> None:
        if self.on_iterator_ready is not None:
            self.on_iterator_ready()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block in which this loader can be iterated (an evaluation on the training data) without any effect on its
        position and on an iteration under way. Inside, each ``iter()`` is a whole epoch, the first one in the order of
        the present epoch. `Guard.outside_step` has it around it. Training thread."""
        ready, self.on_iterator_ready = self.on_iterator_ready, None
        before = self._live, self._torch_loader, self._torch_iterator
        self._live = self._torch_loader = self._torch_iterator = None
        try:
            with self._cursor.set_aside():
                yield
        finally:
            self._live, self._torch_loader, self._torch_iterator = before
            self.on_iterator_ready = ready

    def shutdown(self) -> None:
        """End the worker processes now: ask, wait half a second, SIGKILL.

        Idempotent; any thread, but not two at once.
        """
        iteration = None if self._live is None else self._live()
        if iteration is not None:
            iteration.stop()
        iterator = self._torch_iterator
        self._torch_loader = self._torch_iterator = None
        end_workers(iterator, grace_s=_SHUTDOWN_GRACE_S)

    # --- the position ---

    def _current_settings(self) -> dict[str, Any]:
        """What a position depends on."""
        return {"kind": self._form, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """The position, a new dict each time; call it every step. What a replaying loader needs to begin the epoch
        again, about 10 KB of arrays, the dicts of one epoch share: do not change those in place."""
        return self.state_at(self._cursor.mark())

    def state_at(self, at: LoaderMark, later: Sequence[LoaderMark] = ()) -> dict[str, Any]:
        """The same for an earlier position. `later`: those after it, up to the present one."""
        if self._settings is None:
            self._settings = self._current_settings()
        return {
            **self._settings,
            "epoch": at.epoch,
            "batch": at.batch,
            "samples": at.samples,
            "finished": at.finished,
            "streams": VERSION,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration starts at this position. Raises MismatchError, and changes nothing, where the settings or
        the kind differ."""
        if self._takes_first_seed and isinstance(state.get("seed"), int):
            self.seed = state["seed"]
        self._load(state, self._current_settings())

    def _load(self, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        check_unchanged(self._form, state, expected)
        check_numbers(state, "epoch", "batch", "samples")
        check_streams(state)
        self._cursor.move_to(
            state["epoch"], batch=state["batch"], samples=state["samples"], finished=bool(state.get("finished"))
        )
