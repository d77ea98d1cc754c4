"""The loops of a guard: `epochs`, `steps`, `enumerate`. Where the training stands, and where a resumed loop goes on.

A resumed program runs from its first line, so code that stands before the resumed place runs again: the begin of the
epoch that is resumed in its middle, and what stands between two loops over epochs. Its random numbers are those of the
first time, and afterwards the streams are as at the boundary:

==============================================  ========================================================================
at                                              the random streams are put back
==============================================  ========================================================================
the yield of the resumed epoch                  as they were at that place the first time, where code drew before the
                                                epoch's first batch; else as at the boundary
the first batch of it (or the news that none    as at the boundary
is left), the first yield of `steps`, the end
of a loop that has nothing left to do
==============================================  ========================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from mindx_elastic.capture.adapters import Attributes
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import PlainComponent
from mindx_elastic.capture.copying import same_tree
from mindx_elastic.capture.loop_ends import without_end, without_step
from mindx_elastic.capture.rng import capture_rng, equal_rng, pack_rng, restore_rng
from mindx_elastic.capture.weight_samples import WeightSample, WeightSamples
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import has_method
from mindx_elastic.core.position import Position
from mindx_elastic.core.printable import listed
from mindx_elastic.data.position import whole_number
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.loops.between_steps import (
    BetweenSteps,
    named_streams,
    put_back_small_state,
    put_back_streams,
)
from mindx_elastic.guard.loops.epoch_tail import EpochTail, EpochValues
from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.loops.own_loop import OwnLoop
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Loops", "NumberedBatches", "without_streams"]


class NumberedBatches(Iterator[tuple[int, Any]]):
    """The batches of a loader with their numbers in the epoch. It has the loader's length, which what is around it asks
    for: a bar, torchvision's `MetricLogger`."""

    def __init__(self, loader: Iterable[Any], start: int) -> None:
        self._loader, self._start = loader, start
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __next__(self) -> tuple[int, Any]:
        if self._batches is None:
            self._batches = iter(self._loader)
            self._number = _batches_done(self._loader) + self._start - 1
        batch = next(self._batches)
        self._number += 1
        return self._number, batch


def _batches_done(loader: Any) -> int:
    """Batches of its epoch that an iteration of `loader` that has just begun leaves out. Raises UsageError."""
    state = loader.state_dict() if has_method(loader, "state_dict") else None
    if not isinstance(state, Mapping) or not isinstance(state.get("batch"), int):
        raise UsageError(
            f"guard.enumerate({type(loader).__name__}): it cannot tell where it stands in its epoch; name the loader "
            "in Guard(loader=...) and give it to guard.enumerate() itself, tqdm and the like around that"
        )
    return int(state["batch"])


_IDLE_ITERATIONS = 1000
_TAILS = (1, 2, 8)  # after which boundaries of the process
_WEIGHTS_CHANGED = (
    "weights are changed inside the guard's block, outside of its steps, and a resumed run does that again",
    "Do it before `with guard:`, or let guard.step decide whether to do it",
)
# The keys of `Collector.loop`.
_STREAMS, _ONE_STEP, _OWN_PACE, _LENGTH = "epoch_streams", "one_step_epochs", "own_pace", "epoch_length"


class Loops:
    """One per guard. Training thread only."""

    def __init__(self, loaders: Loaders) -> None:
        self.step = self.epoch = self.step_in_epoch = 0
        """The counters of the last boundary, as in `Position`."""
        self._loaders, self.loaders = loaders, loaders.named
        self.asked = False
        """The program has asked where it is: an own counter of its can follow the resumed position."""
        self.are_batches_numbered = False
        """The program numbers its batches by `Guard.enumerate`."""
        self.is_layered = False
        """A layer above keeps the loop, and its callbacks may change what they like before it; or this guard does not
        train. Then the loop is not looked at."""
        self._has_looped = False  # over `epochs` or `steps`
        self._pass_of_epoch = 0  # the loader's epoch of the last batch that this epoch has used; 0: none yet
        self._is_judged = self._repeats = False  # the latter: another pass over the loader, within an epoch of our loop
        self._first = self._resumed_epoch = 0
        self._shorter: tuple[str, str] | None = None
        """A loop that the resumed run is past already, and how far that is; another loop may go on after it."""
        self._is_resuming = self._restores = False
        self._armed: dict[int, bool] = {}
        """By `id`, the loaders whose next iterator is waited for, and whether the streams are put back then."""
        self._empty_epoch = 0
        self.tail = EpochTail(loaders)

    # --- around the block ---

    def enter(
        self,
        collector: Collector,
        unmanaged: Unmanaged,
        guard: object,
        targets: Mapping[str, Any],
        *,
        restore: Callable[[], None] | None,
        late_boundary: Callable[[], None],
        leave_step: Callable[[], None],
        enter_step: Callable[[], None],
        is_clean: Callable[[], bool],
    ) -> None:
        """The state is back, and the stages run: go on from its position. `targets`: what `guard` keeps. `restore`
        puts the random streams back as at that boundary; None: a fresh start. `late_boundary`: the step counted last is
        a boundary after all. `leave_step`, `enter_step`: around code that belongs to no step. `is_clean`: as
        `UpdateGate.is_clean`.
        """
        position = collector.position
        self.step, self.epoch, self.step_in_epoch = position.step, position.epoch, position.step_in_epoch
        self._restore, self._first, self._resumed_epoch = restore, position.step, position.epoch
        self._resumed_steps, self._rest = position.step_in_epoch, 0
        self._is_resuming = self._restores = restore is not None  # no loop has reached the resumed place yet
        targets = {name: t.target if isinstance(t, Attributes) else t for name, t in targets.items()}
        kept = [guard, *targets.values(), *self.loaders]
        kept += [t.adoption.loader for t in targets.values() if isinstance(t, FollowedLoader) and t.adoption]
        self._kept = frozenset(map(id, kept))
        self._own_loop = OwnLoop(targets)
        self._is_clean, self._samples = is_clean, WeightSamples(collector)
        self._weights = self._samples.take()
        self._left = self._boundaries = 0
        self.at_head_end: Callable[[], None] = lambda: None
        """Called when an epoch's first batch is asked for."""
        self._tail_steps = frozenset() if self.is_layered else frozenset(self._first + n for n in _TAILS)
        self._between = BetweenSteps(collector, unmanaged, self._samples, is_clean, is_resumed=self._is_resuming)
        self._loaders.watch.at_evaluation = self.watch_tail
        self._ended_steps: dict[int, int] = {}  # by epoch, 0: of the whole training
        self._counted_inside = False
        self._collector, self._unmanaged = collector, unmanaged
        self._late_boundary, self._leave_step, self._enter_step = late_boundary, leave_step, enter_step
        self._running: object = None  # the loop over epochs that has yielded last
        self._ended = 0  # epochs that a loop of this process has gone through
        self._done = 0  # the last epoch whose body has ended in this process
        self._between_loops = self._in_epoch = False
        self._is_late = False
        self._cuts_in_epoch = self._steps_of_epoch = 0  # the latter of a loop over steps within the epoch; 0: none
        self._steps_of_run = 0  # of one that makes no epochs
        self._begin: dict[str, Any] | None = None
        self._arm(restore=self._restore is not None)
        for own in self._loaders.own:
            own.on_iterator_ready = partial(self.at_first_batch, restores=True)

    def why_it_failed(self, error: BaseException) -> str:
        """What an exception that leaves the block most likely comes from, where that is known here; else empty."""
        if isinstance(error, StopIteration) and self._first and self.epoch == self._resumed_epoch:
            return (
                f"epoch {self.epoch} was resumed, and its loop has asked for more batches than are left. If it counts "
                "by itself, write for step in guard.steps(len(loader), start=0): there. Make an iterator before the "
                "loop, not where next() has failed. For itertools.cycle(loader) write a generator with `while True: "
                "yield from loader`"
            )
        if not self._empty_epoch or self.step != self._first or not isinstance(error, Exception):
            return ""
        return (
            f"epoch {self._empty_epoch} was resumed after its last step, so its loop over the loader has run without "
            f"a batch, and then came {type(error).__name__}. Set what the code after that loop reads in front of it "
            "(losses = []), and let it do without (`if losses:`)"
        )

    @property
    def position(self) -> Position:
        """The last boundary passed."""
        return Position(self.step, self.epoch, self.step_in_epoch, self._loaders.num_batches())

    @property
    def waits_for_tail(self) -> bool:
        """The code after an epoch runs, and other ranks go to its end: so does this one."""
        return self.tail.is_pending and not self.tail.is_alone

    def count(self, *, is_boundary: bool) -> Position | None:
        """A step has ended. `is_boundary`: outside of an accumulation window, with batches that are known. Returns
        the position, where a run can be resumed from here.

        Without a loader only the program knows what is left of its epoch. Where every epoch has one step (the whole
        data at once), a resumed run begins with the next epoch; where the program counts the steps of an epoch by
        itself, with the resumed one. The first step of all does not tell: it is a boundary once its epoch ends
        (`late_boundary`), and none if a second one follows.
        """
        first = self._loaders.counting
        current = self._loaders.epoch_of_first if first is None else first.epoch
        if self._in_epoch:
            if first is not None and first.epoch_used not in (0, self.epoch) and not self._goes_on():
                self._collector.loop = {**self._collector.loop, _OWN_PACE: True}
                first.cursor.requested = None  # its next iteration is the epoch after the one it is in
            if 0 < self._pass_of_epoch < current and not (first and first.began_with_others):  # few data next to many
                self._repeats = True
            self._pass_of_epoch = current
        elif self.epoch == 0 or current > self.epoch:  # lower: a loader that another phase has read
            self._repeats = self.epoch > 0
            self.epoch, self.step_in_epoch = max(1, current, self.epoch), 0
        self.step += 1
        self.step_in_epoch += 1
        self._restores = self._is_resuming = False  # also where the program makes its first steps by its own loop
        if self.tail.is_pending or self.tail.may_go_on:
            self.tail.pass_step()
        if self._collector.loop:
            self._collector.loop = without_step(self._collector.loop)
        if self._between.is_watching:
            self._between.leave()
            self._loaders.at_next_ask(None)
        if not is_boundary:
            return None
        # As `position`, without calls of Python's at each boundary.
        batches = self._loaders.num_batches() if first is None else first.batches
        position = tuple.__new__(Position, (self.step, self.epoch, self.step_in_epoch, batches))
        self._boundaries += 1
        self._cuts_in_epoch += 1
        if self.loaders or not self._in_epoch:
            return position
        one_step = self._collector.loop.get(_ONE_STEP)
        self._is_late = one_step is None and self._cuts_in_epoch == 1
        if one_step is not False and self._cuts_in_epoch > 1:
            self._collector.loop = {**self._collector.loop, _ONE_STEP: False}
        return None if self._is_late else position

    # --- epochs ---

    def epochs(self, num_epochs: int, start: int) -> Iterator[int]:
        """See `Guard.epochs`."""
        self._has_looped = True
        return self._epochs(whole_number("num_epochs", num_epochs, low=0), whole_number("start", start))

    def _epochs(self, num_epochs: int, start: int) -> Iterator[int]:
        if 0 < num_epochs <= self._ended:
            raise UsageError(
                f"guard.epochs({num_epochs}): a loop before it has gone through guard.epochs({self._ended}), and the "
                f"numbers go on from loop to loop; for {num_epochs} more epochs write "
                f"guard.epochs({self._ended + num_epochs})"
            )
        self._begin_loop()
        if self._left and self._left != num_epochs and not self.asked:
            self._unmanaged.risk(
                f"a loop over guard.epochs({self._left}) was left before its end, and another loop follows, so a run "
                "that is resumed in the second loop begins with the first one again",
                "Let guard.position.epoch decide whether to begin the first one",
            )
        kept = self._kept.union(map(id, self._loaders.parts()))
        self.tail.begin_loop(None if self.is_layered else EpochValues(sys._getframe(1), kept))
        own, self._left = object(), num_epochs
        self._running = own
        first = self._first_epoch(num_epochs)
        if first > num_epochs and self._is_resuming:
            self._shorter = f"epochs({num_epochs})", f"epoch {self.epoch}"
            self.tail.resume()
            self.tail.put_back(sys._getframe(1))
        try:
            for epoch in range(first, num_epochs + 1):
                self._begin_epoch(epoch)
                self.tail.pass_step()
                yield epoch - 1 + start
                if self._running is not own:
                    raise UsageError(
                        "two loops over guard.epochs() run at once: the inner one has moved the position that the "
                        "outer one goes on from. Loop over guard.epochs() once, and over guard.steps(n) inside it"
                    )
                self._end_epoch()
        finally:
            self._in_epoch = False
        if self._is_resuming and (self.epoch == num_epochs or self.tail.was_left()):  # else it is in a later loop
            self.reach_resumed_step()
            if self.tail.is_over(self.epoch):
                self.tail.move_on(is_last=True)  # code after the loop may iterate them, as update_bn() does
        self._ended, self._left = max(self._ended, num_epochs), 0
        self._between_loops = True
        self._leave_step()

    def _begin_loop(self) -> None:
        if self._between_loops:
            self._between_loops = False
            self._enter_step()
        if self.is_layered or self._is_resuming or self._is_clean() or not self._samples.changed_since(self._weights):
            return
        if not self.asked:
            tell = self._unmanaged.risk if self.step else self._unmanaged.certain
            tell(*_WEIGHTS_CHANGED)

    def _keep_resumed_state(self) -> None:
        """The loop has reached the resumed place: what the program's own begin has changed is put back."""
        if self.is_layered:
            return
        if not self._is_clean() and self._samples.changed_since(self._weights):
            self._unmanaged.certain(*_WEIGHTS_CHANGED)
        if changed := put_back_small_state(self._collector):
            logger.warning(
                "%s: put back as at step %d, for it was changed inside the guard's block before the loop reached the "
                "resumed place, where a run that is never stopped has long been. To change it from here on, do it "
                "inside the loop",
                listed(changed, 4),
                self.step,
            )

    def _first_epoch(self, num_epochs: int) -> int:
        if self.step == self._first and self.tail.was_left():
            return num_epochs + 1
        if self._done >= self.epoch or self._is_over():
            return self.epoch + 1
        if not self._is_resuming:
            # An earlier loop was left inside this epoch. From here on as a run that is resumed at its last boundary.
            if self._collector_says_finished():
                return self.epoch + 1
            self._put_loaders_back()
        return max(1, self.epoch)

    def _is_over(self) -> bool:
        """Whether the epoch of the last boundary has nothing left, not even code after its last boundary."""
        if self.tail.is_over(self.epoch):
            return True
        return not self.loaders and self.step_in_epoch > 0 and bool(self._collector.loop.get(_ONE_STEP))

    def _collector_says_finished(self) -> bool:
        states = [self._copied(loader) for loader in self.loaders]
        return any(state.get("epoch") == self.epoch and state.get("finished") for state in states)

    def _copied(self, loader: Any) -> Mapping[str, Any]:
        """The state of `loader` at the last boundary."""
        for component in self._collector.components.values():
            target = component.target if isinstance(component, PlainComponent) else None
            if target is loader or (isinstance(target, FollowedLoader) and target.loader is loader):
                state = component.state()
                return state if isinstance(state, Mapping) else {}
        return {}

    def _put_loaders_back(self) -> None:
        if self.step_in_epoch:
            for loader in self.loaders:
                if has_method(loader, "load_state_dict") and (state := self._copied(loader)):
                    loader.load_state_dict(state)

    def _begin_epoch(self, epoch: int) -> None:
        self._in_epoch, self._is_late, self._cuts_in_epoch, self._steps_of_epoch = True, False, 0, 0
        self._pass_of_epoch = 0
        resuming, self._is_resuming = self._is_resuming, False
        again = epoch == self.epoch and self.step_in_epoch > 0  # its begin has been done before
        if resuming:
            self._keep_resumed_state()
            if self.tail.is_over(epoch - 1):
                self.tail.move_on(is_last=False)
                self._loaders.begin_after_an_epoch()
            assert self._restore is not None
            self._restore()
        self._restores = resuming and again
        self._empty_epoch = epoch if self._restores and self._collector_says_finished() else 0
        if epoch != self.epoch:
            self.epoch, self.step_in_epoch = epoch, 0
        for loader in self.loaders[:1]:  # others may go at another pace, and start again within an epoch
            if has_method(loader, "set_epoch") and not self._goes_on():
                loader.set_epoch(epoch)
        if self._loaders.counting is not None:  # other loaders go at their own pace
            self._loaders.counting.begin_epoch()
        loop = self._collector.loop
        if self._restores:
            self.tail.resume()
            self._arm(restore=True)
            if streams := loop.get(_STREAMS):
                restore_rng(streams["global"])
                put_back_streams(self._collector, streams["named"])
        elif again:
            self._collector.loop = without_end(loop)
        else:
            self._collector.loop = without_streams(without_end(loop))
            self._begin = {"global": capture_rng(), "named": named_streams(self._collector)}
            self._arm(restore=False)

    def end(self) -> None:
        """The block has ended by itself."""
        self._leave_epoch(is_left=True)
        if self._shorter is not None and self.step == self._first and self._is_resuming:
            text = (
                "guard.%s: the resumed run is at %s already, so this loop makes no step; to train on give a larger one"
            )
            logger.warning(text, *self._shorter)

    def _leave_epoch(self, *, is_left: bool) -> None:
        """`is_left`: the loop over epochs may have been left by a `break`."""
        if self._is_late:
            self._is_late = False
            self._collector.loop = {**self._collector.loop, _ONE_STEP: True}
            self._late_boundary()
        if self.tail.is_pending and self._left:
            self.tail.pass_step()  # a `break`: the boundary stays in front of the code that may decide otherwise then
        elif self.tail.is_pending:
            self.tail.pass_tail(self.epoch)
        # Others could not go back in front of the tail that a rank was killed in. So with several ranks only the end of
        # the training is such a boundary.
        elif (
            self._left and self._loaders.take_drained() and (self.tail.is_alone or is_left or self.epoch >= self._left)
        ):
            self.tail.pass_tail(self.epoch, pass_boundary=self._late_boundary, is_left=is_left)

    def _end_epoch(self) -> None:
        """The body of the epoch has ended."""
        if self._is_late or self.tail.is_pending:
            self._between.leave()  # the boundary is here
        if self.tail.is_pending or self._has_own_end():
            self.tail.pass_tail(self.epoch)
        self._leave_epoch(is_left=False)
        if self._is_over():
            self._between.look()
        self._between.leave()
        self._in_epoch, self._done = False, self.epoch
        if not (self.loaders or self._counted_inside or self.is_layered):
            self._see_length()

    def _has_own_end(self) -> bool:
        """The epoch's body has ended. Whether only the program knew that the last boundary would be the last one of it:
        its tail was not waited for, so with several ranks only the end of the training is such a boundary."""
        is_last = self.epoch >= self._left
        if not self.counts_by_itself or self._collector.position.step != self.step or not self._cuts_in_epoch:
            return False
        if is_last:
            self._collector.last_step = self.step
        return self.tail.is_alone or is_last

    @property
    def counts_by_itself(self) -> bool:
        """The epoch has several steps, and nothing but the program knows how many."""
        others = self.loaders or self._counted_inside or self.is_layered
        return self._in_epoch and not others and self._collector.loop.get(_ONE_STEP) is False

    def _see_length(self) -> None:
        """An epoch has ended whose steps the program counts. The rest of a resumed one that is as long as a whole one
        has started it over, whatever the program has asked in front of its loop."""
        if self.epoch == self._resumed_epoch and self._resumed_steps:
            self._rest = self.step_in_epoch - self._resumed_steps
        else:
            self._collector.loop = {**self._collector.loop, _LENGTH: self.step_in_epoch}
        if 0 < self._rest == self._collector.loop.get(_LENGTH):
            self._rest = 0
            self._own_loop.tell_of_epoch(self._unmanaged)

    # --- a loader that goes through its data at another pace ---

    def _goes_on(self) -> bool:
        """Whether the epochs of the first loader are not those of the loop: the loop goes through its data several
        times in an epoch, or takes a number of batches from an endless iterator."""
        return bool(self._collector.loop.get(_OWN_PACE))

    # --- loops that count by themselves ---

    def _judge_own_loop(self) -> None:
        """The boundary has been copied. Raises UnmanagedStateError."""
        if not self._repeats and self._loaders.has_ends:
            return
        self._is_judged = True
        if self.is_layered or self._own_loop.may_know:
            return
        if self._in_epoch and not self._counted_inside:
            self._own_loop.refuse_inside(self._unmanaged)
        elif not self._has_looped:
            self._own_loop.refuse(self._unmanaged)

    def at_boundary(self, sample: Mapping[str, WeightSample] | None) -> None:
        """The boundary has been copied. `sample`: of its weights, where one was taken."""
        if self._between.drawn is not None:
            self._between.judge_drawn(*self._between.drawn)
        if (self._repeats or self._cuts_in_epoch == 2) and not (self.asked or self._is_judged):
            self._judge_own_loop()
        is_first = self._first and self.step == self._first + 1 and self.step_in_epoch > 1  # of an epoch's rest
        if is_first and self._in_epoch and not (self.loaders or self.asked or self._counted_inside or self.is_layered):
            self._own_loop.tell_of_epoch(self._unmanaged)
        if self._in_epoch:
            ends = self.step_in_epoch >= self._steps_of_epoch if self._steps_of_epoch else None
            first = self._loaders.counting
            if ends is None and self._cuts_in_epoch == 1 and first is not None and first.is_given_up:
                ends = True  # one step an epoch, of some of its batches
            self._loaders.watch.ends_epoch = bool(ends)
            self.tail.at_boundary(sys._getframe(1), ends=ends)
        if self.step in self._tail_steps:
            self.watch_tail(sample)

    def watch_tail(self, sample: Mapping[str, WeightSample] | None = None) -> None:
        """See whether the code between this boundary and the next batch moves what the boundary has. Also after an
        evaluation, whose result such code may note."""
        if not self.is_layered:
            self._between.watch(sample)
            self._loaders.at_next_ask(self._between.look)

    # --- the streams at the resumed place ---

    def _arm(self, *, restore: bool) -> None:
        ready = [loader for loader in self.loaders if hasattr(loader, "on_iterator_ready")]
        begun = [loader for loader in ready if restore and self._had_begun(loader)]
        for loader in ready:
            if id(loader) not in self._armed:
                loader.on_iterator_ready = partial(self._at_ready, loader, loader.on_iterator_ready)
                self._armed[id(loader)] = restore and not begun
            self._armed[id(loader)] |= loader in begun

    def _at_ready(self, loader: Any, other: Callable[[], None] | None) -> None:
        """An iterator of `loader` is there. `other`: what was to be called then before."""
        loader.on_iterator_ready = other
        self.at_first_batch(restores=self._armed.pop(id(loader)))
        if other is not None:
            other()

    def _had_begun(self, loader: Any) -> bool:
        """Whether `loader` had given a batch of the resumed epoch at the boundary."""
        state = self._copied(loader)
        return state.get("epoch") == self.epoch and bool(state.get("batch"))

    def at_first_batch(self, *, restores: bool) -> None:
        """The program is about to get an epoch's first batch, or the first one of a resumed run."""
        self.at_head_end()
        if restores and self._restores:
            assert self._restore is not None
            self._restore()
            self._armed = dict.fromkeys(self._armed, False)  # what comes now belongs to the step
        elif self._begin is not None:
            named = named_streams(self._collector)
            if not (equal_rng(self._begin["global"], capture_rng()) and same_tree(self._begin["named"], named)):
                streams = {**self._begin, "global": pack_rng(self._begin["global"])}
                self._collector.loop = {**self._collector.loop, _STREAMS: streams}
            self._begin = None

    def is_at_end(self, *, is_tail_over: bool) -> bool:
        """Whether no step comes next, as far as the loops and loaders tell: the code after an epoch does, or the end of
        the training. `is_tail_over`: the code after the epoch has run."""
        if self._steps_of_run:
            return self.step >= self._steps_of_run
        if is_tail_over:
            return self.epoch >= self._left > 0
        is_one_step = not self.loaders and self._left > 0 and not self.counts_by_itself
        last = self._steps_of_epoch or self.position.batch_num or int(is_one_step)
        return self._loaders.at_end_of_epoch()[0] or 0 < last <= self.step_in_epoch

    # --- steps, enumerate ---

    def steps(self, num_steps: int, start: int) -> Iterator[int]:
        """See `Guard.steps`."""
        self._has_looped = True
        return self._steps(whole_number("num_steps", num_steps, low=0), whole_number("start", start))

    def _steps(self, num_steps: int, start: int) -> Iterator[int]:
        inside = self._in_epoch
        if inside and not self.loaders and self._collector.loop.get(_ONE_STEP) is None:
            self._collector.loop = {**self._collector.loop, _ONE_STEP: False}
        if not inside:
            self._begin_loop()
            self._shorter = f"steps({num_steps})", f"step {self.step}"
        ended = (self.epoch if inside else 0, num_steps)
        if 0 < num_steps <= self._ended_steps.get(ended[0], 0):
            raise UsageError(
                f"guard.steps({num_steps}): a loop before it has gone through as many steps"
                f"{' of this epoch' * inside}, and the numbers go on from loop to loop; for {num_steps} more write "
                f"guard.steps({self._ended_steps[ended[0]] + num_steps})"
            )
        self._counted_inside = self._counted_inside or inside
        self._steps_of_epoch, self._steps_of_run = (num_steps, 0) if inside else (0, num_steps)
        self._collector.last_step = num_steps + (self.step - self.step_in_epoch if inside else 0)
        idle, has_step = 0, False
        while (before := self.step_in_epoch if inside else self.step) < num_steps:
            self.reach_resumed_step()
            self._boundaries, has_step = 0, True
            yield before + start
            self._between.look()  # the head of the next step is done again after a resume
            if self._boundaries > 1:
                self._unmanaged.certain(
                    f"an iteration of guard.steps({num_steps}) has passed {self._boundaries} boundaries, and a run "
                    "that is resumed at one before its end starts the iteration over",
                    "Call guard.step_end() once in an iteration, at its end",
                )
            idle = idle + 1 if (self.step_in_epoch if inside else self.step) == before else 0
            if idle >= _IDLE_ITERATIONS:
                raise UsageError(
                    f"{idle} iterations of guard.steps({num_steps}) have not called guard.step_end(): it counts the "
                    "boundaries. Call it once in each iteration, after the optimizer has stepped"
                )
        if inside or (self._is_resuming and before == num_steps):  # else the resumed place is in a later loop
            self.reach_resumed_step()
        if inside and not has_step:
            self.tail.put_back(sys._getframe(1))
        elif inside:
            self.tail.see_last_step(sys._getframe(1))
        self._ended_steps = {ended[0]: num_steps}
        if not inside:
            self._between_loops = True
            self._leave_step()

    def reach_resumed_step(self) -> None:
        """The code that comes now has nothing in front of it that a resumed run does again: the random streams are as
        at the resumed boundary."""
        if self._is_resuming:
            self._is_resuming = False
            self._keep_resumed_state()
        if self._restores:
            assert self._restore is not None
            self._restore()
            self._restores = False
        elif self._begin is not None:
            self.at_first_batch(restores=False)


def without_streams(loop: Mapping[str, Any]) -> dict[str, Any]:
    """`Collector.loop` without the streams that the epoch began with."""
    return {key: value for key, value in loop.items() if key != _STREAMS}
