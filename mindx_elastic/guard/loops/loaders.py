"""The loaders of a guard: which ones it keeps, where each of them is at a boundary, and what is known against it.

A stock DataLoader is *adopted* (`data.adoption`) while the guard is entered. The position that a boundary saves is that
of the batches that steps have used (`data.look_ahead`), not of those that the loop has fetched.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import asked, has_method
from mindx_elastic.data import FunctionLoader, ReplayLoader, ResumableLoader
from mindx_elastic.data.adoption import Adoption
from mindx_elastic.data.look_ahead import LookAhead
from mindx_elastic.data.position import num_batches
from mindx_elastic.data.replay import is_stream, is_torchdata, keeps_state
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.checks.program_variables import program_frames
from mindx_elastic.guard.loops.followed_loader import FollowedLoader, SelfPositionedLoader
from mindx_elastic.guard.loops.loader_watch import LoaderWatch
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Loaders"]


class Loaders:
    """One per guard. Training thread."""

    def __init__(self, loader: Any, stateful: Mapping[str, Any] | None) -> None:
        """`loader`, `stateful`: as the guard was given them. Raises UsageError for what could not be resumed."""
        several = isinstance(loader, (list, tuple)) and bool(loader) and all(map(_is_loader, loader))
        self._followed: list[FollowedLoader] = []
        self.own: list[SelfPositionedLoader] = []
        """DataLoaders that are kept by their own state."""
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
            # An iterable of another kind there is none: a network in layers, a replay memory.
            kinds = (DataLoader, ReplayLoader, FunctionLoader)
            self.stateful = {n: self._target(n, v) if isinstance(v, kinds) else v for n, v in stateful.items()}
        others = [each for each in targets if not isinstance(each, (FollowedLoader, SelfPositionedLoader))]
        self.positioned_by_themselves = [*self.own, *others]
        """What gives the positions of those that no cursor of ours follows."""
        self.first: Any = self.named[0] if self.named else None
        """The loader whose epochs and batches count; None without one."""
        self.counting = next((each for each in self._followed if each.loader is self.first), None)
        """The same, if it is one of ours."""
        self.num_batches: Callable[[], int] = (
            partial(num_batches, self.first) if self.counting is None else self.counting.num_batches
        )
        """Batches of one epoch on one rank where the loader knows it, else 0."""
        self.of_epochs = self.counting if len(self._followed) == len(self.named) else None
        """`counting` where all are ours: others cannot be told to begin their next epoch."""
        self.has_ends = self.first is not None and bool(asked(self.first, "_has_ends", True))
        """Whether there is a loader, and its passes end: else nothing but the program knows its place."""
        self.may_fetch_ahead = True
        """The loop may fetch a batch before it has used the last one."""
        self.has_short_epochs = False
        """The loop may leave an epoch early, and a resumed one leaves it at the same batch."""

    @property
    def epoch_of_first(self) -> int:
        """What the first loader says of its epoch, which is none of ours; 0: nothing."""
        return int(asked(self.first, "epoch", 0) or 0)

    def _target(self, name: str, loader: Any) -> Any:
        adoption = None
        if is_stream(loader):
            raise UsageError(
                f"{name} is a stream of Hugging Face's datasets, whose own state leaves out the shuffle buffer: its "
                "samples would be lost. Write before the guard: loader = mindx_elastic.data.from_loader(loader), or a "
                "DataLoader over it; and iterate that"
            )
        adoptable = isinstance(loader, DataLoader) and not isinstance(loader, ResumableLoader)
        if adoptable and (not keeps_state(loader) or is_torchdata(type(loader))):
            adoption = Adoption(loader)
            loader = adoption.resumable
        if isinstance(loader, (ResumableLoader, ReplayLoader, FunctionLoader)):
            followed = FollowedLoader(name, loader, adoption)
            self._followed.append(followed)
            self.named.append(loader)
            return followed
        if not keeps_state(loader):
            raise UsageError(_refusal(name, loader))
        self.named.append(loader)
        if not isinstance(loader, DataLoader):
            return loader
        self.own.append(own := SelfPositionedLoader(loader))
        return own

    # --- life ---

    def begin(self, stack: ExitStack, *, is_again: bool) -> None:
        """Before the state is loaded. `is_again`: see `FollowedLoader.begin`."""
        for followed in self._followed:
            stack.callback(followed.leave)
            followed.begin(is_again=is_again)

    def enter(self, stack: ExitStack, unmanaged: Unmanaged, worker_grace_s: float) -> None:
        """The state is back: follow the loaders from here."""
        self._unmanaged = unmanaged
        self.watch = LoaderWatch(unmanaged, self._is_right_after_boundary, kept=self.own, has_named=bool(self.named))
        """Sees batches of loaders that are not named."""
        self.watch.enter(stack)
        self._has_ended = self._are_drained = False
        for followed in self._followed:
            if not self.may_fetch_ahead and followed.look_ahead.ahead is None:
                followed.look_ahead = LookAhead(0)
            followed.loader.worker_grace_s = worker_grace_s
            followed.follow(unmanaged)
            if followed is self.counting:
                followed.others = [other for other in self._followed if other is not followed]
            if followed.adoption is not None and not followed.has_told:  # not at each recovery in place
                followed.has_told = True
                logger.info("%s: %s", followed.name, followed.adoption.describe())

    def _is_right_after_boundary(self) -> bool:
        """Whether there is an iteration of the first loader that has given no batch since the last boundary."""
        first = self.counting
        if first is None or not first.cursor.live or first.look_ahead.ahead:
            return False
        return first.handed == first.handed_before

    def by_name(self) -> list[tuple[str, Any]]:
        """All loaders, the resumable one in place of an adopted one, and their names."""
        followed = [(each.name, each.loader) for each in self._followed]
        known = {id(loader) for _, loader in followed}
        return followed + [("loader", loader) for loader in self.named if id(loader) not in known]

    def are_ahead(self) -> bool:
        """Whether the loop has fetched batches for later steps."""
        return any(followed.look_ahead.ahead for followed in self._followed)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, batches are for an evaluation."""
        was, self.watch.is_outside = self.watch.is_outside, True
        try:
            yield
        finally:
            self.watch.is_outside = was

    def shutdown(self) -> None:
        """End the workers: a stuck one would delay the exit."""
        for loader in self.named:
            if hasattr(loader, "shutdown"):
                loader.shutdown()

    def parts(self) -> list[Any]:
        """Their data sets, and what hangs on those."""
        return [part for each in self._followed for part in each.parts()]

    # --- steps ---

    def at_next_ask(self, look: Callable[[], None] | None) -> None:
        """Have `look` called when the loop asks for the next batch of its epoch, where it fetches none ahead."""
        for followed in self._followed:
            followed.at_next_ask = look if followed.look_ahead.ahead == 0 else None

    # --- the end of an epoch ---

    def at_end_of_epoch(self) -> tuple[bool, bool]:
        """Call it at a boundary. Whether its step has used the last batch of an epoch, and whether the first loader
        knows that before the next one is asked for."""
        followed = self.of_epochs
        if followed is None or followed.look_ahead.ahead:
            return False, True
        return self._has_ended, followed.loader._foresees_end

    def at_every_ask(self, look: Callable[[], None]) -> None:
        """Have `look` called in the training thread whenever a batch is asked for."""
        for followed in self._followed:
            followed.at_every_ask = look

    def take_drained(self) -> bool:
        """An epoch's code has ended. Whether its last step was no boundary for one reason only: it has used what was
        fetched ahead of it, and none was left. Once for each such step."""
        are_drained, self._are_drained = self._are_drained, False
        return are_drained and all(f.handed == f.look_ahead.used for f in self._followed)

    def at_rest(self) -> list[str]:
        """The names of those whose next iteration is another epoch."""
        return [f.name for f in self._followed if f.is_at_rest()]

    def move_on(self, names: Collection[str], *, is_last: bool) -> None:
        """Those had ended at the loaded boundary. Their next iteration is the epoch after that, unless it `is_last`:
        then code behind it goes through the next one."""
        for followed in self._followed:
            if followed.name in names and not followed.has_moved_on:
                followed.loader._end_loaded() if is_last else followed.loader._move_on()

    def begin_after_an_epoch(self) -> None:
        """A resumed run goes on with the epoch after the one of its boundary. A loader that was in the middle of its
        data goes on there where the program keeps its iterator over epochs, and starts over where the head of the epoch
        makes one: in a function that is not a generator, before any batch."""
        for followed in self._followed:
            cursor = followed.cursor
            if followed is not self.counting and cursor.pending and cursor.batch and not cursor.is_at_end:
                cursor.at_begin = partial(self._begin_anew, followed)

    def _begin_anew(self, followed: FollowedLoader) -> None:
        place = next(program_frames(sys._getframe(1)), None)
        has_batch = any(each.handed for each in self._followed)
        if not has_batch and place is not None and not place.f_code.co_flags & inspect.CO_GENERATOR:
            followed.loader._move_on()

    def at_boundary(self) -> bool:
        """A step has ended: settle which batches it has used. Returns whether that is known, for all loaders. Raises
        UnmanagedStateError for batches that no position covers.
        """
        known, would_do, self._has_ended, first = True, True, False, self.counting
        for followed in self._followed:
            is_known = followed.at_boundary(is_first=followed is first)
            known, would_do = known and is_known, would_do and (is_known or followed.is_drained)
            self._has_ended |= followed.has_ended_epoch
            if followed.left_early and (self.has_short_epochs or self._ended_with(followed)):
                followed.left_early = False
            if (
                followed.left_early
                or followed.other_thread is not None
                or followed.look_ahead.is_doubtful
                or followed.steps_since_end == 2
            ):
                followed.tell(self._unmanaged)
        self._are_drained = would_do and not known
        watch = self.watch
        watch.num_boundaries += 1
        if watch.crossing:
            watch.tell_crossing()
        is_idle = known and first is not None and not first.has_used and first.is_in_mid_epoch()
        if first is not None and is_idle and not any(followed.has_used for followed in self._followed):
            self._unmanaged.risk(
                f"a step has ended without a batch of {first.name}, in the middle of an epoch: if it uses "
                "an earlier batch again, a run that stops before it goes on with the next batch",
                "Call step_end() once a batch, after all that is done with it",
            )
        return known

    def _ended_with(self, left: FollowedLoader) -> bool:
        """Whether another loader came to its end where that epoch was left, as in ``zip(shorter, longer)``."""
        return any(other.ended_behind == left.left_behind for other in self._followed if other is not left)

    def take_all_as_used(self) -> None:
        """The training ends at a step that is not a boundary yet: take what was fetched as used."""
        for followed in self._followed:
            followed.look_ahead.take_all_as_used(followed.fetches)


def _is_loader(value: Any) -> bool:
    return isinstance(value, (DataLoader, ReplayLoader)) or (has_method(value, "__iter__") and keeps_state(value))


def _refusal(name: str, loader: Any) -> str:
    kind = type(loader).__name__
    wrapped = "loader = mindx_elastic.data.from_loader(loader)"
    if has_method(loader, "__next__"):
        return (
            f"{name} is a {kind}, which can be gone through only once and knows no position: give what makes it "
            f"(a DataLoader, or an object whose __iter__ starts again): {wrapped}"
        )
    return f"{name} is a {kind}, which knows no position. Write before the guard: {wrapped}; and iterate that"
