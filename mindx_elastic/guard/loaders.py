"""The loaders of a guard: which ones it keeps, where each of them is at a boundary, and what is known against it.

A stock DataLoader is *adopted* (`data.adoption`) while the guard is entered. The position that a boundary saves is that
of the batches that steps have used (`data.look_ahead`), not of those that the loop has fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from mindx_elastic.core.events import logger
from mindx_elastic.data import ReplayLoader, ResumableLoader
from mindx_elastic.data.adoption import Adoption
from mindx_elastic.data.iteration import Engine
from mindx_elastic.data.look_ahead import LookAhead
from mindx_elastic.data.position import epoch_reader, num_batches
from mindx_elastic.data.track import Track
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["FollowedLoader", "Loaders"]

_AHEAD, _PER_STEP = "ahead", "per_step"  # in the state of a loader, beside its position


class FollowedLoader:
    """A loader of ours, as a checkpoint sees it: its state is that of the batches that were used."""

    def __init__(self, name: str, loader: ResumableLoader | ReplayLoader, adoption: Adoption | None) -> None:
        self.name, self.loader, self.adoption = name, loader, adoption
        self.engine: Engine = loader._engine
        self.track: Track | None = None
        self.look_ahead = LookAhead()
        self._iteration, self._num_batches = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position if a step ended now; right after `at_boundary`, that of the boundary."""
        state, ahead = self._position(), self.look_ahead.ahead
        if ahead is not None:
            state[_AHEAD], state[_PER_STEP] = ahead, self.look_ahead.per_step
        return state

    def _position(self) -> dict[str, Any]:
        track, look_ahead = self.track, self.look_ahead
        if track is None or not look_ahead.ahead:
            return self.loader.state_dict()
        seen = track.fetches
        # Which of the last batches of an epoch are used, only the boundary itself tells.
        used = look_ahead.used if seen.exhausted else look_ahead.used_by(seen)
        return self.loader.state_dict() if used == seen.handed else self.loader.state_at(track.mark_after(used))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.adoption is not None:
            self.adoption.take_seed(state)
        self.loader.load_state_dict(state)
        ahead, per_step = state.get(_AHEAD), state.get(_PER_STEP, 1)
        if isinstance(ahead, int) and ahead >= 0 and isinstance(per_step, int) and per_step > 0:
            self.look_ahead = LookAhead(ahead, per_step)

    def begin(self) -> None:
        self.look_ahead = LookAhead()
        if self.adoption is not None:
            self.adoption.begin()

    def follow(self) -> None:
        self.track = self.engine.cursor.track = Track(self.engine.cursor.mark())

    def leave(self) -> None:
        self.track = self.engine.cursor.track = None
        if self.adoption is not None:
            self.adoption.end()

    def epoch(self) -> int:
        """Of the newest batch that was used."""
        if self.track is None or not self.look_ahead.ahead:
            return self.engine.cursor.epoch
        return self.track.mark_after(self.look_ahead.used).epoch

    def num_batches(self) -> int:
        """Batches of an epoch. An iteration fixes them when it begins; asked at every boundary."""
        iteration = self.engine.cursor.token
        if iteration != self._iteration or not iteration:
            self._iteration, self._num_batches = iteration, num_batches(self.loader)
        return self._num_batches

    def at_boundary(self) -> bool:
        """Returns whether it is known which batches were used."""
        track, look_ahead = self.track, self.look_ahead
        assert track is not None
        if look_ahead.ahead == 0:  # as in most loops: every batch that was fetched was used
            look_ahead.used = track.forget_all()
            return True
        was_known = look_ahead.ahead is not None
        if not look_ahead.at_boundary(track.fetches):
            return False
        track.forget_before(look_ahead.used)
        if look_ahead.ahead and not was_known:
            logger.info(
                "the loop fetches %d batches of %s ahead; a resumed run gets them again", look_ahead.ahead, self.name
            )
        return True


class Loaders:
    """One per guard. Training thread."""

    def __init__(self, loader: Any, stateful: Mapping[str, Any] | None) -> None:
        """`loader`, `stateful`: as the guard was given them. Raises UsageError for what could not be resumed."""
        several = isinstance(loader, (list, tuple)) and bool(loader) and all(map(_is_loader, loader))
        self._followed: list[FollowedLoader] = []
        self.named: list[Any] = []
        """Every loader, the resumable one in place of an adopted one."""
        given = list(loader) if several else [] if loader is None else [loader]
        names = [f"loader_{number}" for number in range(len(given))] if several else ["loader"]
        targets = [self._target(name, one) for name, one in zip(names, given, strict=False)]
        self.argument: Any = targets if several else targets[0] if targets else None
        """What to save under the guard's `loader`."""
        self.stateful: Any = stateful
        """What to save under its `stateful`."""
        if isinstance(stateful, Mapping):
            self.stateful = {n: self._target(n, v) if _is_loader(v) else v for n, v in stateful.items()}
        self.first: Any = self.named[0] if self.named else None
        """The loader whose epochs and batches count; None without one."""
        followed = self._followed[0] if self._followed and self._followed[0].loader is self.first else None
        self.epoch: Callable[[], int] = epoch_reader(self.first) if followed is None else followed.epoch
        """The epoch of the newest batch that was used, else 0."""
        self.num_batches: Callable[[], int] = (
            partial(num_batches, self.first) if followed is None else followed.num_batches
        )
        """Batches of one epoch on one rank where the loader knows it, else 0."""
        self._fetches_ahead = True

    def expect_no_look_ahead(self) -> None:
        """The loop is known to use each batch before it fetches the next one."""
        self._fetches_ahead = False

    def _target(self, name: str, loader: Any) -> Any:
        adoption = None
        if isinstance(loader, DataLoader) and not isinstance(loader, ResumableLoader) and not _keeps_state(loader):
            adoption = Adoption(loader)
            loader = adoption.resumable
        if isinstance(loader, (ResumableLoader, ReplayLoader)):
            followed = FollowedLoader(name, loader, adoption)
            self._followed.append(followed)
            self.named.append(loader)
            return followed
        if not _keeps_state(loader):
            raise UsageError(_refusal(name, loader))
        self.named.append(loader)
        return loader

    # --- life ---

    def begin(self, stack: ExitStack) -> None:
        """Before the state is loaded."""
        for followed in self._followed:
            stack.callback(followed.leave)
            followed.begin()

    def enter(self, unmanaged: Unmanaged, worker_grace_s: float) -> None:
        """The state is back: follow the loaders from here."""
        for loader in self.named:
            if hasattr(loader, "worker_grace_s"):
                loader.worker_grace_s = worker_grace_s
        for followed in self._followed:
            if not self._fetches_ahead and followed.look_ahead.ahead is None:
                followed.look_ahead = LookAhead(0)
            live = followed.engine.live
            if live is not None:
                live.outdated = partial(
                    unmanaged.certain,
                    f"this iterator of {followed.name} was made before the guard was entered, and gives other batches "
                    "than the position says",
                    "Make it inside of the block, after `with guard:`",
                )
            followed.follow()
            if followed.adoption is not None:
                logger.info("%s: %s", followed.name, followed.adoption.describe())

    def shutdown(self) -> None:
        """End the workers: a stuck one would delay the exit."""
        for loader in self.named:
            if hasattr(loader, "shutdown"):
                loader.shutdown()

    # --- steps ---

    def at_boundary(self) -> bool:
        """A step has ended: settle which batches it has used. Returns whether that is known, for all loaders."""
        known = True
        for followed in self._followed:
            known = followed.at_boundary() and known
        return known

    def settle(self) -> bool:
        """The training ends: take what was fetched as used where that is not known. Returns whether it was not."""
        unknown = False
        for followed in self._followed:
            if followed.track is not None and followed.look_ahead.ahead is None:
                unknown = unknown or followed.look_ahead.used != followed.track.fetches.handed
                followed.look_ahead.settle(followed.track.fetches)
        return unknown


def _keeps_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _is_loader(value: Any) -> bool:
    return isinstance(value, (DataLoader, ReplayLoader)) or (hasattr(value, "__iter__") and _keeps_state(value))


def _refusal(name: str, loader: Any) -> str:
    kind = type(loader).__name__
    wrapped = "loader = mindx_elastic.data.from_loader(loader)"
    if hasattr(loader, "__next__"):
        return (
            f"{name} is a {kind}, which can be gone through only once and knows no position: give what makes it "
            f"(a DataLoader, or an object whose __iter__ begins anew): {wrapped}"
        )
    return f"{name} is a {kind}, which knows no position. Write before the guard: {wrapped}; and iterate that"
