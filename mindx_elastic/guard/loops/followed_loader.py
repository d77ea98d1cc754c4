"""A loader of ours, as a checkpoint sees it: the position of what was used, and what is set on its data set."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from mindx_elastic.capture.given_settings import Listing, listing_of
from mindx_elastic.capture.plain_component import GoesThroughData
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import length_of
from mindx_elastic.data import FunctionLoader, ReplayLoader, ResumableLoader
from mindx_elastic.data.adoption import Adoption
from mindx_elastic.data.look_ahead import LookAhead
from mindx_elastic.data.position import SETTINGS, check_unchanged, num_batches
from mindx_elastic.data.replay import parts_with_epoch
from mindx_elastic.data.sampler import rank_and_world_size
from mindx_elastic.data.track import LoaderMark, Track
from mindx_elastic.guard.loops.data_settings import DataSettings
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["FollowedLoader", "SelfPositionedLoader", "epochs_put_back"]

_Ours: TypeAlias = ResumableLoader | ReplayLoader | FunctionLoader
_AHEAD, _PER_STEP, _OVER = "ahead", "per_step", "over"  # in the state of a loader, besides its position


class SelfPositionedLoader:
    """A DataLoader that keeps its position by itself, with workers that look after themselves (streams of litdata and
    mosaicml-streaming).

    Between a load and the next iteration its state is what was loaded, and it is not asked: litdata's ``state_dict()``
    would move a loaded position to the first epoch. Neither does it get the dict that the guard keeps: it writes there.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader: Any = loader
        self._loaded: Any = None
        self._handed = self._at_load = 0  # batches of this epoch
        self.on_iterator_ready: Callable[[], None] = lambda: None
        """Called when an iterator has been made, which may have drawn from torch's stream."""

    def begin_iteration(self) -> None:
        self._loaded, self._handed, self._at_load = None, self._at_load, 0
        self.on_iterator_ready()

    def hand_out(self) -> None:
        self._handed += 1

    def state_dict(self) -> Any:
        return {"own": self.loader.state_dict(), "batches": self._handed} if self._loaded is None else self._loaded

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, Mapping) or state.keys() != {"own", "batches"}:
            if isinstance(state, Mapping) and state.get("kind") in ("resumable", "replay", "function"):
                check_unchanged(f"{type(self.loader).__name__}, with its own state", state, {})
            state = {"own": state, "batches": 0}  # version 0.1 had the library's state as it is
        self.loader.load_state_dict(copy.deepcopy(state["own"]))
        self._loaded, self._at_load = state, state["batches"]
        length = length_of(self.loader)
        if length and self._at_load >= length and type(self.loader).__module__.partition(".")[0] in _MOVE_ON:
            self._at_load = 0
            _iterate_once_with(self.loader, self._begin_rest)
        elif type(self.loader).__iter__ is not DataLoader.__iter__ and not _iterate_once_with(
            self.loader, self._begin_own_iteration
        ):
            self._loaded = None

    def _begin_rest(self, loader: Any) -> Iterator[Any]:
        """The loaded epoch has no batch left, and torch makes no iterator for it."""
        self.on_iterator_ready()
        return iter(())

    def _begin_own_iteration(self, loader: Any) -> Iterator[Any]:
        """Its class may make no iterator of torch's, which would tell of the iteration (`LoaderWatch`)."""
        self._loaded = None
        return iter(loader)


_MOVE_ON = ("litdata", "streaming")
"""Libraries whose loaders, loaded after the last batch of an epoch, begin another one when they are iterated."""


def _iterate_once_with(loader: Any, begin: Callable[[Any], Iterator[Any]]) -> bool:
    """The next ``iter(loader)`` is ``begin(loader)``; those after it are its class's own again. False: its class
    refuses subclasses."""
    kind = type(loader)
    kind = getattr(kind, "_mindx_class", kind)

    def once(self: Any) -> Iterator[Any]:
        object.__setattr__(self, "__class__", kind)
        return begin(self)

    words = {"__iter__": once, "__module__": kind.__module__, "_mindx_class": kind}
    try:
        object.__setattr__(loader, "__class__", type(kind.__name__, (kind,), words))
    except Exception:  # of code of the program: an __init_subclass__, a metaclass
        return False
    return True


class FollowedLoader(GoesThroughData, Track):
    """A loader of ours, as a checkpoint sees it: its state is that of the batches that were used."""

    def __init__(self, name: str, loader: _Ours, adoption: Adoption | None) -> None:
        super().__init__()
        self.name, self.loader, self.adoption = name, loader, adoption
        self.gives_copies = isinstance(loader, ResumableLoader)  # numbers and words, in a new dict
        self.draws = isinstance(loader, ReplayLoader)
        self.cursor = loader._cursor
        self.look_ahead = LookAhead()
        self._iteration = self.batches = 0
        """`batches`: of an epoch, as of the last boundary."""
        self.settings: DataSettings | None = None
        self.others: Sequence[FollowedLoader] = ()
        """For the loader whose epochs count: the loaders that come within its epochs."""
        self.began_with_others = False
        """One of those was gone through when the newest iteration began."""
        self._is_over = False
        """It ended before the present epoch of the first loader: its next iteration is another one."""
        self.has_moved_on = False
        """Whether it had moved on at the loaded boundary."""
        self.has_told = False
        """How its order arises has been said."""
        self.steps_since_end = 0
        """Steps since it ended, which have used no batch of it."""
        self.is_drained = False
        """The last step has used all that was fetched ahead, up to an epoch's end: see `at_boundary`."""
        self.has_served_steps = False
        """A step has ended in the middle of the newest iteration; an evaluation goes through all of it between two."""
        self.has_used = self.has_ended_epoch = False
        """What the last step has done: used a batch, or the last one of an epoch."""
        self.epoch = 0
        """The epoch of the newest batch that was used, as of the last boundary; 0 where there are no epochs."""
        self.epoch_used = 0
        """The epoch whose batches the last step has used; 0: none, or the loop fetches ahead."""

    def noted(self) -> tuple[Any, ...]:
        """The position if a step ended now; right after `at_boundary`, that of the boundary."""
        cursor, look_ahead = self.cursor, self.look_ahead
        ahead = look_ahead.ahead
        place = tuple.__new__(LoaderMark, (cursor.epoch, cursor.batch, cursor.samples, cursor.finished, cursor.start))
        later: Sequence[LoaderMark] = ()
        is_over = self._is_over or not (cursor.live or cursor.pending or cursor.finished or ahead)  # as `is_given_up`
        if ahead and not self._is_over:
            place, later = self._place_of_used(place)
        own = None if self.settings is None else self.settings.state()
        return place, later, ahead, look_ahead.per_step, is_over, own, self.loader._settings

    def _place_of_used(self, place: LoaderMark) -> tuple[LoaderMark, Sequence[LoaderMark]]:
        """Where batches are fetched ahead up to `place`: the position of what was used, and those after it."""
        look_ahead, seen = self.look_ahead, self.fetches
        # Which of the last batches of an epoch are used, only the boundary itself tells.
        used = look_ahead.used if seen.exhausted else look_ahead.used_by(seen)
        if used == seen.handed:
            return place, ()
        at, *later = self.marks_from(used)
        return at, [*later, place]

    def made_of(self, noted: tuple[Any, ...]) -> dict[str, Any]:
        place, later, ahead, per_step, is_over, own, settings = noted
        state = self.loader.state_at(place, later)
        if settings is not None:  # those of then
            state |= settings
        if ahead is not None:
            state[_AHEAD], state[_PER_STEP] = ahead, per_step
        if is_over:
            state[_OVER] = True
        if own is not None:
            state[SETTINGS] = own
        return state

    def state_dict(self) -> dict[str, Any]:
        return self.made_of(self.noted())

    @property
    def beginning(self) -> object:
        return self.cursor.start

    @staticmethod
    def as_of_another_rank(state: Any) -> Any:
        """The state of a loader, whose data set may have been set for another rank."""
        if not isinstance(state, Mapping) or not isinstance(state.get(SETTINGS), Mapping):
            return state
        return {**state, SETTINGS: {**state[SETTINGS], "num_ranks": 0}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.adoption is not None:
            self.adoption.take_seed(state)
        if self.settings is not None:
            self.settings.load(state.get(SETTINGS), state.get("epoch"))
            if self.adoption is not None:
                self.adoption.take_over()
        self.loader.load_state_dict(state)
        if state.get(_OVER) is True:
            self.loader._move_on()
            self.has_moved_on = True
        ahead, per_step = state.get(_AHEAD), state.get(_PER_STEP, 1)
        if isinstance(ahead, int) and ahead >= 0 and isinstance(per_step, int) and per_step > 0:
            self.look_ahead = LookAhead(ahead, per_step)

    @property
    def _inner(self) -> Any:
        """The program's own loader."""
        given = self.loader if self.adoption is None else self.adoption.loader
        return given.loader if isinstance(given, ReplayLoader) else given

    def parts(self) -> list[Any]:
        """The data set and what hangs on it."""
        return [] if self.settings is None else list(self.settings.parts.values())

    def listing(self) -> Listing:
        return {} if self.settings is None else listing_of(self.settings.parts)

    def begin(self, *, is_again: bool) -> None:
        """`is_again`: the same entry goes on after a recovery in place. Else what the program has set on the data set
        since an earlier entry counts, where there is no boundary to go on from."""
        self.look_ahead = LookAhead()
        self._is_over = self.has_moved_on = False
        self.steps_since_end = 0
        if self.settings is None:
            self.settings = DataSettings(self._inner, rank_and_world_size(None, None)[1])
        elif is_again:
            self.settings.reset()
        else:
            self.settings.begin_again()
        if self.adoption is not None:
            self.adoption.begin()

    def follow(self, unmanaged: Unmanaged) -> None:
        """The state is back."""
        cursor = self.cursor
        self.count_from(cursor.mark())
        cursor.track = self
        cursor.outdate()
        cursor.at_older = partial(
            unmanaged.certain,
            f"{self.name} is iterated twice at once, or its iterator was made before the guard was entered, and a "
            "position has one place only",
            "Make the iterator after `with guard:`. Put an evaluation on it into `with guard.outside_step():`, or make "
            "a second loader and name both",
        )
        cursor.loaded = cursor.mark() if cursor.pending and cursor.batch else None

    def iteration_begins(self) -> None:
        super().iteration_begins()
        self._is_over = self.has_served_steps = False
        self.began_with_others = any(other.cursor.live for other in self.others)
        for other in self.others:
            other._is_over = other.is_at_rest()
            if other._is_over:  # an evaluation has used them, no step will
                other.begin_epoch()
        if self.settings is not None:
            self.settings.at_begin(self.cursor.epoch)

    def leave(self) -> None:
        self.count_from(None)
        self.cursor.track = self.cursor.loaded = self.cursor.at_older = None
        if self.adoption is not None:
            self.adoption.end()

    def num_batches(self) -> int:
        """Batches of an epoch. An iteration fixes them when it begins; asked at every boundary."""
        iteration = self.cursor.token
        if iteration != self._iteration or not iteration:
            self._iteration, self.batches = iteration, num_batches(self.loader)
        return self.batches

    def begin_epoch(self) -> None:
        """The loop begins an epoch: what it has fetched before it does not use."""
        if self.look_ahead.ahead is None:
            self.look_ahead.pass_over(self.fetches)
            self.forget_before(self.look_ahead.used)

    def at_boundary(self, *, is_first: bool) -> bool:
        """A step has ended: settle which batches it has used. Returns whether that is known. `is_first`: its epochs are
        those of the loop."""
        cursor, look_ahead = self.cursor, self.look_ahead
        cursor.loaded, before = None, look_ahead.used
        if look_ahead.ahead == 0:  # as in most loops: every batch that was fetched was used
            is_known, look_ahead.used = True, self.handed
            if self.keeps_marks:
                self.use_all()
        else:
            is_known = self._settle()
        number, self.handed_before = self.handed - self.handed_before, self.handed
        self.boundaries += 1
        self.epoch_used = cursor.epoch if number and look_ahead.ahead == 0 else 0
        if cursor.token != self._iteration:
            self.num_batches()
        if self.loader._has_ends:
            self.epoch = self.mark_after(look_ahead.used).epoch if look_ahead.ahead else cursor.epoch
        # As `is_at_end`, without a call at each boundary.
        is_at_end = cursor.finished or (cursor.size is not None and cursor.is_at_end)
        self.has_ended_epoch = number > 0 and is_at_end
        self.has_served_steps |= number > 0 and cursor.live
        self.has_used = number > 0 or look_ahead.used != before
        if look_ahead.used != before:
            self.steps_since_end = 0
        elif is_known and self.handed and not cursor.live and (self.has_served_steps or is_first):
            self.steps_since_end += 1
        return is_known

    def _settle(self) -> bool:
        look_ahead, seen = self.look_ahead, self.fetches
        was_known, before, self.is_drained = look_ahead.ahead is not None, look_ahead.used, False
        if not look_ahead.at_boundary(seen):
            return False
        self.forget_before(look_ahead.used)
        if look_ahead.ahead and seen.exhausted and before < look_ahead.used == seen.handed:
            # The end of an epoch. After a resume here the epoch would come once more without batches, and code that
            # reads ahead takes its first one for granted: the boundary comes once the epoch's code has ended.
            self.is_drained = True
            return False
        if look_ahead.ahead and not was_known:
            logger.info(
                "the loop fetches %d batches of %s ahead; a resumed run gets them again", look_ahead.ahead, self.name
            )
        return True

    def is_in_mid_epoch(self) -> bool:
        """Whether it is gone through, and has given a batch."""
        return self.cursor.live and self.handed > 0

    @property
    def is_given_up(self) -> bool:
        """Whether its pass has more batches, and the program has no iterator of it any more: next(iter(loader))."""
        return not (self.cursor.live or self.cursor.pending or self.cursor.finished)

    def is_at_rest(self) -> bool:
        """Whether its next iteration is another epoch than the one of its position."""
        return not self.cursor.live and not self.cursor.pending

    def tell(self, unmanaged: Unmanaged) -> None:
        """What the fetches since the last boundary show, where they show something."""
        if self.other_thread is not None:
            name, self.other_thread = re.sub(r"\d+", "N", self.other_thread), None  # each epoch may have another one
            unmanaged.certain(
                f"batches of {self.name} are fetched in another thread ({name}), so which of them a step has used is "
                "not known",
                "Iterate it in the thread that trains; its workers load ahead (num_workers=, prefetch_factor=)",
            )
        if self.look_ahead.is_doubtful:
            self.look_ahead.is_doubtful = False
            unmanaged.risk(
                f"steps take different numbers of batches of {self.name}, and the first ones looked as if the loop "
                "fetched ahead: which batches a boundary has used is not certain, and a resumed run may use some of "
                "them again",
                "Iterate the loader itself in the loop that calls guard.step_end(), as guard.enumerate(loader) does; "
                "where a batch is left out, call guard.step_end() before `continue`",
            )
        if self.steps_since_end == 2 and self.kept_batches > 1:
            unmanaged.risk(
                f"steps go on after the end of an epoch of {self.name}, and the program keeps its batches, as "
                "itertools.cycle does: a resumed run has only those that came after the stop",
                "Iterate the loader again in each epoch (`while True: yield from loader`), instead of a list of its "
                "batches",
            )
        if self.left_early:
            self.left_early = False
            unmanaged.risk(
                f"the loop leaves an epoch of {self.name} right after a step, with batches left: a run that stops at "
                "that very step goes on with this epoch, and a resumed one counts its batches from the resumed one",
                "Leave it before the step: `for i, batch in guard.enumerate(loader): if i == n: break`",
            )


def epochs_put_back(targets: Iterable[Any]) -> set[tuple[int, str]]:
    """The `id` of samplers and data sets of the program whose ``epoch`` the loaders among `targets` put back, and that
    name."""
    loaders = (each.loader for each in targets if isinstance(each, FollowedLoader))
    replayed = [loader for loader in loaders if isinstance(loader, ReplayLoader)]
    return {(id(part), "epoch") for loader in replayed for part in parts_with_epoch(loader)}
