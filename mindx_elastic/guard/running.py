"""Runs a block that may be entered again in the same process: after a recovery in place, see `rejoin`.

`run_in_place` calls the block with its `InPlaceGuard`, which the guard is given before it is entered. When another rank
has died, the guard is left with `EnterAgain`, and the block is called again: in this process, and from the beginning in
the new process of the dead rank.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from torch import nn

from mindx_elastic.agreement.connect import open_ahead, open_exchange
from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Part
from mindx_elastic.alarm.alarm import Alarm
from mindx_elastic.alarm.signals import release_signals
from mindx_elastic.capture.ddp import ddp_modules
from mindx_elastic.capture.rng import capture_rng
from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import WorkerPhase
from mindx_elastic.errors import GracefulExit, MismatchError, UnmanagedStateError
from mindx_elastic.guard.active import has_been_one
from mindx_elastic.guard.checks.program_variables import look
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.loops.followed_loader import epochs_put_back
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.observers import observers
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.persist.reader import Checkpoint
from mindx_elastic.platforms.launchers import current_ranks
from mindx_elastic.rejoin import groups, nccl, spare, spare_warmup
from mindx_elastic.rejoin.before_call import ObjectsBeforeCall, VariablesPart
from mindx_elastic.rejoin.failures import RejoinFailed, comes_from_failure
from mindx_elastic.rejoin.member import (
    PARTS_DIFFER,
    GuardEntry,
    Host,
    LeavesToRejoin,
    Member,
    find_member,
    join_job,
    tell_once,
)
from mindx_elastic.start.in_place import Boundary

__all__ = ["EnterAgain", "InPlaceGuard", "program_now", "run_in_place", "tell_of_block"]

_T = TypeVar("_T")
_CARRIED = frozenset({"signal", "flag", "request", "fault"})  # not what a death or an error has brought
_MOST_ERRORS = 20  # each made of the one before
_CONNECTIONS = 4  # of an exchange, and of a member
_IMPORTED_LATER = ("torch.nn.utils.prune",)  # when a state is loaded
_is_running = False  # `run_in_place` has been called


class EnterAgain(BaseException):
    """Leaves the block of a guard that is to be entered again."""

    def __init__(self, entry: GuardEntry, stopper: Stopper) -> None:
        super().__init__("the guard is entered again")
        self.entry = entry
        self._stopper = stopper

    @property
    def unanswered(self) -> Alarm | None:
        """Once the guard is closed: the stop that was asked for while it was being left; None: none was."""
        alarm = self._stopper.alarm
        return alarm if alarm is not None and alarm.kind in _CARRIED else None


class InPlaceGuard:
    """A guard's part in recoveries in place, for one entry. Training thread."""

    def __init__(
        self,
        member: Member,
        entry: GuardEntry | None,
        objects: ObjectsBeforeCall,
        unanswered: Alarm | None = None,
        *,
        join: Callable[[], GuardEntry] | None = None,
    ) -> None:
        """`entry`: what the last recovery has agreed on; None: there was none. `objects`: see `rejoin.before_call`.
        `unanswered`: see `EnterAgain`; the job stops for it as soon as the guard is open. `join`: gives the entry of a
        new process, which waits for the other ranks."""
        self.member, self._entry, self.objects, self._unanswered = member, entry, objects, unanswered
        self._join = join

    @property
    def entry(self) -> GuardEntry | None:
        """What the last recovery has agreed on; None: there was none. In a new process it is waited for, once."""
        if self._join is not None:
            join, self._join = self._join, None
            self._entry = join()
        return self._entry

    @property
    def is_again(self) -> bool:
        """Whether there is an entry, or will be."""
        return self._join is not None or self._entry is not None

    @property
    def can_prepare(self) -> bool:
        """Whether the other ranks are not out of their loops yet, so that no rank waits while a new process does what
        needs none of them."""
        return self._join is not None and not self.member.others_are_out()

    @property
    def name(self) -> str:
        """The name of this entry: the same for processes of all ages."""
        entry = self.entry
        return f"entry{0 if entry is None else entry.generation}"

    def open_exchange(self, ranks: RankInfo, over: str = "") -> Exchange:
        """The exchange of this entry. `over`: of a layer above."""
        return open_exchange(ranks, f"{over}{self.name}", again=self.entry is not None)

    def boundary(self) -> Boundary | None:
        """What the start takes in place of files; None: they count."""
        entry = self.entry
        if entry is None:
            return None
        verdict, live = entry.verdict, entry.live

        def snapshot() -> Path:
            try:
                return entry.where()
            except RejoinFailed as error:
                raise MismatchError(f"this process cannot take a dead rank's place: {error}") from None

        return Boundary(
            generation=entry.generation,
            moment=(verdict.run_id, verdict.attempt, verdict.step),
            next_attempt=verdict.next_attempt,
            live=None if live is None else Checkpoint(entry.info, dict(live), {}),
            snapshot=snapshot,
            dead=verdict.dead,
            donor=verdict.donor,
        )

    def parts(self, kept: Collection[Any]) -> list[Part]:
        """For the last meeting of the entry, when the state is back. `kept`: what the guard keeps."""
        entry, rank = self.entry, self.member.ranks.rank
        is_new = entry is not None and rank in entry.verdict.dead and self.objects.variables is None
        variables = VariablesPart(self.objects, program_now(kept, sys._getframe()), rank, is_new=is_new)
        return [*self.member.parts(), *([] if entry is None else [variables])]

    def opened(self, stopper: Stopper, around: Connections, loaders: Loaders, ddp: groups.DdpModules) -> None:
        """The guard is open."""
        member = self.member
        groups.devices.look()
        stopper.update_gate.before_update = member.before_update

        def at_batch() -> None:
            if member.wants_out:  # with what the program's variables have now
                stopper.saver.collector.before_keeping()
            member.at_batch()

        loaders.at_every_ask(at_batch)
        host = Host(
            stopper.saver,
            around.memory,
            stopper.update_gate,
            stopper.step_gate,
            stopper.watcher,
            ddp,
            self.objects,
            is_stopping=lambda: stopper.alarm is not None,
            peers_gone_soon=lambda: bool(stopper.peers_gone_soon(RuntimeError())),
            end=stopper.end_unsaved,
        )
        member.opened(host)
        if not stopper.saver.replicated:
            tell_once(member.ranks, f"{PARTS_DIFFER}: when a rank dies, the whole job is restarted")
        member.page.set(in_place=1, generation=member.generation)
        if self.entry is not None:
            member.entered()
        if (alarm := self._unanswered) is not None:
            stopper.watcher.post(lambda: stopper.hear(alarm))

    def comes_out(self, error: BaseException | None, stopper: Stopper) -> bool:
        """Whether the block has been left, with `error`, because another rank has died."""
        member = self.member
        if isinstance(error, (LeavesToRejoin, GracefulExit, UnmanagedStateError)):
            return isinstance(error, LeavesToRejoin)
        _end_if_broken(error)
        if member.wants_out:  # None: the program has caught what took it out
            return error is None or isinstance(error, Exception)
        if not isinstance(error, Exception) or not comes_from_failure(error):
            return False
        return bool(stopper.peers_gone_soon(error)) and member.comes_out_soon()

    def leave(
        self, error: BaseException | None, stopper: Stopper, around: Connections, loaders: Loaders
    ) -> EnterAgain | GracefulExit:
        """The block has been left with `error`. Agree with the others on what to enter again with: nothing is saved,
        memory is kept. Where that is not possible the rank has saved, and a GracefulExit is the way out."""
        if stopper.alarm is None:
            self.member.page.set(phase=WorkerPhase.BETWEEN)
        _end_frames(error)
        try:
            entry = self.member.leave()
        except RejoinFailed as problem:
            if stopper.alarm is None:
                logger.warning("no recovery in place: %s; the job is restarted", problem)
            else:  # it has been said why the job stops
                logger.debug("no recovery in place: %s", problem)
            stopper.stop_for_death()
            return stopper.exit()
        loaders.shutdown()
        around.stay_open()
        for parameter in stopper.saver.collector.parameters:
            parameter.grad = None
        return EnterAgain(entry, stopper)


def _end_frames(error: BaseException | None) -> None:
    """Give up the variables of the program's calls that the error has ended. A generator among them ends now: a
    collective in its ``finally`` would later run over the new connections, where no new process takes part in it."""
    for _ in range(_MOST_ERRORS):
        if error is None:
            break
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # Up to Python 3.12 a look at a frame's variables (the checks take some) leaves a dict of them in it, which
            # holds them until it is asked for again.
            frame.f_locals  # noqa: B018
        error = error.__cause__ or error.__context__


def _end_if_broken(error: BaseException | None) -> None:
    """With an error of CUDA that stays, no state of this rank can be saved, and no other rank can use it."""
    if nccl.is_device_error(error) and groups.devices.is_used and (broken := nccl.broken_context()):
        nccl.end_process(broken)


def run_in_place(
    block: Callable[[InPlaceGuard | None], _T],
    targets: Callable[[], Mapping[str, Any]],
    *,
    enters_at_once: bool = False,
) -> _T:
    """Call `block` until it ends by itself. `targets`: what the guard in it keeps, in a process that has built that.
    `enters_at_once`: the first that `block` does is to enter that guard."""
    ahead_of_rank = _warm_up(targets()) if spare.is_waiting() else None
    modules = [target for target in targets().values() if isinstance(target, nn.Module)]
    member = find_member(current_ranks(RankInfo.from_env()), modules, is_first_guard=not has_been_one())
    global _is_running
    _is_running = True
    if member is None:
        return block(None)
    entry: GuardEntry | None = None
    join: Callable[[], GuardEntry] | None = None
    if member.is_joiner and not member.has_entered:
        join = partial(join_job, member, ddp_modules(targets()))
        member.laid_out = {} if ahead_of_rank is None else ahead_of_rank.laid_out
        # What comes before the guard may use the groups; and ranks that wait already go on in parallel with this one.
        if not enters_at_once or member.others_are_out():
            entry, join = join(), None
    member.has_entered = True
    unanswered: Alarm | None = None
    objects = ObjectsBeforeCall(targets()) if ahead_of_rank is None else ahead_of_rank.objects
    objects.look_at_groups()
    try:
        while True:
            try:
                return block(InPlaceGuard(member, entry, objects, unanswered, join=join))
            except EnterAgain as again:
                join = None
                entry, unanswered = again.entry, again.unanswered
                objects.put_back()
                # With it go the frames of the program's loop, its iterators, their workers.
                again.__context__ = again.__cause__ = again.__traceback__ = None
    finally:
        release_signals()
        member.closed()
        if (arena := member.take_arena()) is not None:
            arena.close()


def program_now(kept: Collection[Any], frame: FrameType) -> dict[str, str]:
    """The program's own variables, names and digests. `kept`: what the guard keeps. The program may have a module by
    name that is wrapped in a kept one (``DDP(net)``): its buffers are each rank's own, and kept."""
    buffers = (buffer for each in kept if isinstance(each, nn.Module) for buffer in each.buffers())
    look = observers().Variables({*map(id, kept), *map(id, buffers)}, positions=True, but=epochs_put_back(kept))
    now: dict[str, str] = look.of_program(frame)
    return now


def tell_of_block(ranks: RankInfo, *, is_layered: bool) -> None:
    """The program has entered its guard itself, or a trainer has, which keeps the loop (`is_layered`)."""
    settings = RejoinSettings.from_env()
    if settings.in_place and not _is_running and AgentInfo.from_env() is not None and ranks.world_size > 1:
        if settings.generation:
            raise MismatchError("this process cannot take a dead rank's place: it does not enter guard.run(...)")
        layered = (
            "a trainer keeps the loop, which cannot be begun again in the same process, so when a rank dies the whole "
            "job is restarted; in place goes a loop of your own in a function, guard.run(train)"
        )
        block = (
            "the guard is entered with `with guard:`, so when a rank dies the whole job is restarted; make the loop a "
            "function and write guard.run(train)"
        )
        tell_once(ranks, layered if is_layered else block)


class _AheadOfRank(NamedTuple):
    """What a spare has made before it was told its rank."""

    objects: ObjectsBeforeCall
    laid_out: Mapping[str, list[int]]
    """The order in which DDP's gradients arrive, for those modules that are ready for it."""


def _warm_up(targets: Mapping[str, Any]) -> _AheadOfRank:
    """Run in a spare before it is told its rank: prepare what entering the guard will need and no rank determines."""
    open_ahead(_CONNECTIONS)
    for name in _IMPORTED_LATER:
        importlib.import_module(name)
    capture_rng()
    observers().Variables(()).of_program(None)  # judges a thousand modules once, whether they are the program's
    look(None, targets)
    spare_warmup.start_kernels().join()
    known = dict(os.environ)  # not itself, which is asked for the rank
    agent = AgentInfo.from_env(known)
    laid_out: Mapping[str, list[int]] = {}
    if agent is not None:
        laid_out = spare_warmup.lay_out_buckets(ddp_modules(targets), agent.folder, str(agent.attempt))
    return _AheadOfRank(ObjectsBeforeCall(targets), laid_out)
