"""The position of a loader in its data."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import length_of
from mindx_elastic.data.random_streams import VERSION
from mindx_elastic.data.track import LoaderMark, Track
from mindx_elastic.errors import MismatchError, UsageError

__all__ = [
    "SETTINGS",
    "Cursor",
    "at_place_of",
    "check_numbers",
    "check_streams",
    "check_unchanged",
    "num_batches",
    "whole_number",
    "without_order",
]


_tokens = itertools.count(1)  # unique: an iterator from inside of `Cursor.set_aside` must not be taken for a later one


@dataclass
class Cursor:
    """The position of the newest iteration, or of the next one while none has begun.

    `pending`: the next iteration starts at this position; otherwise it starts at the next epoch. `live`: an iteration
    is under way (its iterator is neither exhausted nor dropped).
    """

    epoch: int = 1
    batch: int = 0
    """Batches handed to the caller in this epoch."""
    samples: int = 0
    """Samples handed out in this epoch by all ranks together."""
    finished: bool = False
    """No batch of this epoch is left."""
    start: dict[str, Any] | None = None
    """What a replaying loader must restore to begin this epoch again."""
    pending: bool = True
    live: bool = False
    token: int = 0
    """Number of the newest iteration; older iterators no longer move the position."""
    requested: int | None = None
    """Epoch asked for by `set_epoch` while an iteration is live."""
    loaded: LoaderMark | None = None
    """The position that the process began with, until its first step has ended."""
    size: int | None = None
    """Batches of the newest epoch, where only its end would tell."""
    track: Track | None = None
    """Follows what is handed out, while a guard is entered."""
    at_begin: Callable[[], None] | None = None
    """Called once, before the next iteration begins: it may move the position."""
    at_older: Callable[[], None] | None = None
    """Called before an iterator gives a batch that is not of the newest iteration: a position has one place."""

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, the cursor is at the begin of this epoch, and is not followed; afterwards it is as it was."""
        before = vars(self).copy()
        self.move_to(self.epoch)
        self.track = self.at_begin = self.at_older = None
        try:
            yield
        finally:
            vars(self).update(before)

    def mark(self) -> LoaderMark:
        return LoaderMark(self.epoch, self.batch, self.samples, self.finished, self.start)

    @property
    def next_epoch(self) -> int:
        """Epoch of the live iteration, or else of the next one."""
        return self.epoch if self.live or self.pending else self.epoch + 1

    def move_to(self, epoch: int, *, batch: int = 0, samples: int = 0, finished: bool = False) -> None:
        self.epoch, self.batch, self.samples, self.finished = epoch, batch, samples, finished
        self.start, self.requested, self.pending, self.live = None, None, True, False

    def set_epoch(self, epoch: int) -> None:
        loaded = self.loaded
        if self.live:
            self.requested = epoch
        elif loaded is not None and epoch == loaded.epoch:  # what was fetched since belongs to no step
            self.move_to(epoch, batch=loaded.batch, samples=loaded.samples, finished=loaded.finished)
            self.start = loaded.start
        elif not (self.pending and epoch == self.epoch):
            self.move_to(epoch)

    def begin(self) -> None:
        """A new iteration begins."""
        if self.at_begin is not None:
            hook, self.at_begin = self.at_begin, None
            hook()
        if self.live:
            self._drop()
        if self.requested is not None:
            self.move_to(self.requested)
        elif not self.pending:
            self.move_to(self.epoch + 1)
        self.pending, self.live = False, True
        self.token = next(_tokens)
        if self.track is not None:
            self.track.iteration_begins()

    @property
    def is_at_end(self) -> bool:
        """Whether no batch of this epoch is left, as far as is known before the next one is asked for."""
        return self.finished or (self.size is not None and self.batch >= self.size)

    def _drop(self) -> None:
        if self.track is not None and self.batch and not self.is_at_end:
            self.track.is_dropped()

    def outdate(self) -> None:
        """No iterator that there is moves the position any more."""
        self.token, self.live = next(_tokens), False

    def abandon(self) -> None:
        """The iteration that has just begun could not be set up; the next one starts where it would have."""
        self.pending, self.live = True, False

    def advance(self, token: int, samples: int, finished: bool) -> None:
        """One more batch was handed to the caller."""
        if token == self.token and self.live:
            self.batch += 1
            self.samples = samples
            self.finished = finished
            if self.track is not None:
                self.track.hands_out(self.mark)

    def end(self, token: int, *, exhausted: bool) -> None:
        """The iteration is exhausted or was dropped."""
        if token == self.token and self.live:
            self.live = False
            self.finished = self.finished or exhausted
            if self.track is not None:
                self.track.has_ended(exhausted=exhausted)
                if not exhausted:
                    self._drop()
            if self.requested is not None:
                self.move_to(self.requested)


def whole_number(name: str, value: object, *, low: int | None = None) -> int:
    """`value` as an int. Raises UsageError when it is not a whole number or is below `low`."""
    with suppress(TypeError):
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
        if number is not None and (low is None or number >= low):
            return number
    raise UsageError(f"{name}={value!r}; give a whole number" + ("" if low is None else f" of at least {low}"))


def check_unchanged(kind: str, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise MismatchError when `state` comes from another kind of loader or from other settings than `expected`."""
    if state.get("kind") != kind:
        raise MismatchError(
            f"the checkpoint's data position was written by another kind of loader ({state.get('kind')!r}, "
            f"this one is {kind!r}); use the loader of that run, or start afresh"
        )
    different = [
        f"{name} was {state.get(name)!r}, is {value!r}" for name, value in expected.items() if state.get(name) != value
    ]
    if different:
        raise MismatchError(
            f"the data loader has changed since the checkpoint: {'; '.join(different)}. "
            "Use the values of that run, or start afresh"
        )


def check_streams(state: Mapping[str, Any]) -> None:
    """Say that samples draw otherwise than in the version that wrote `state`. Raises MismatchError for a later one."""
    version = state.get("streams", 1)
    if type(version) is not int or version > VERSION:
        raise MismatchError(
            f"the checkpoint's data position has streams={version!r}, which this version does not know: "
            "use the newer one that wrote it, or start afresh"
        )
    if version < VERSION:
        logger.warning(
            "an earlier version of this package wrote the position: the order goes on, and where samples draw random "
            "numbers (augmentation), they draw others in the rest of the training than they would have"
        )


SETTINGS = "settings"
"""A key in the state of a loader: what the program has set on its data set (`guard.loops.data_settings`)."""
_PLACE = ("epoch", "batch", "samples", "finished")


def at_place_of(state: Any, other: Any) -> dict[str, Any] | None:
    """`state` of a loader, moved on to the batch of `other`: that of another rank's loader, later in the same epoch.

    What begins the epoch again (the streams and the samplers' own generators at its beginning) stays that of `state`.
    So it does where `state` is from the middle of that epoch's first step, and lacks what only a boundary has. An order
    that follows from seed and epoch keeps the seed of `state`, in a later epoch as well. None: they are no states of
    these loaders, or of two epochs. What the program has set on the data set stays that of `state`, too.
    """
    if not all(isinstance(each, dict) and {"kind", *_PLACE} <= each.keys() for each in (state, other)):
        return None
    if not state.keys() - {SETTINGS} <= other.keys() or "following" in other:
        return None
    alike = {"kind", "epoch"} if "start" in state else state.keys() - {"seed", SETTINGS, *_PLACE}
    if "seed" not in state or any(state[name] != other[name] for name in alike):
        return None
    return {**other, **{name: value for name, value in state.items() if name not in _PLACE}}


def without_order(state: Any) -> Any:
    """`state` of a loader without the digest of the samples that it has given: for a loader of another rank."""
    return {**state, "samples": 0} if isinstance(state, dict) and state.get("kind") == "replay" else state


def check_numbers(state: Mapping[str, Any], *names: str) -> None:
    """Raise MismatchError when numbers of a position are not numbers."""
    for name in names:
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise MismatchError(f"the checkpoint's data position is damaged: {name}={value!r}")


def num_batches(loader: Any) -> int:
    """Batches of one epoch on one rank where the loader knows it, else 0."""
    return length_of(loader) or 0
