"""Opens a guard, up to the state being back: log, directories, what there is to save, the other ranks, the restore.

Each thing is opened before those that need it, and `stack` closes them the other way round. What needs no other rank
comes first: a new process in a recovery in place does that while the others come out of their loops. What comes after
it all, once the training goes on, is in `guard` (`Guard._start_stages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Part, meet
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp import BufferBroadcasts, ddp_modules, outermost_replicas, replica_ranks
from mindx_elastic.capture.layouts import ByHand, ParallelSetup
from mindx_elastic.config import ProveSettings, RankInfo, RedundancySettings, RejoinSettings, SavingSettings
from mindx_elastic.core.events import EVENTS_FILE, EventLog, RankFilter, attach_console, logger
from mindx_elastic.guard.active import check_that_one_may_enter
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.divided_saves import DividedSaves, SavesPart, UnevenModules
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.loops.loops import without_streams
from mindx_elastic.guard.observers import observers
from mindx_elastic.guard.options import GuardOptions
from mindx_elastic.guard.periodic import PeriodicSave
from mindx_elastic.guard.policy import job_names
from mindx_elastic.guard.process_end import LogRelay
from mindx_elastic.guard.running import InPlaceGuard
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.platforms.at_start import PlatformAtStart
from mindx_elastic.rejoin.member import GuardEntry
from mindx_elastic.start.directories import (
    RankDirectories,
    check_state_and_space,
    hold_directories,
    prepare_directories,
)
from mindx_elastic.start.start import Start, start_job

__all__ = ["Opening"]


class Opening:
    """One each time a guard is entered. Main thread."""

    def __init__(
        self,
        stack: ExitStack,
        options: GuardOptions,
        ranks: RankInfo,
        targets: Mapping[str, Any],
        loaders: Loaders,
        place: InPlaceGuard | None = None,
        *,
        is_ahead: bool = False,
    ) -> None:
        """Open what needs no other rank. Raises what `Guard` raises on entering. `place`: in recoveries in place.
        `is_ahead`: the other ranks are not out yet. They must not wait, so what may take its time comes later, and they
        can hear of what is raised only later: `meet` raises it."""
        self._is_ahead = is_ahead
        self._problem: Exception | None = None
        self._place, self._is_again = place, place is not None and place.is_again
        self._entry: GuardEntry | None = None
        self.options, self._ranks, self.targets = options, ranks, targets
        try:
            self._prepare(stack, loaders)
        except Exception as error:
            if not is_ahead:
                raise
            self._problem = error

    def _prepare(self, stack: ExitStack, loaders: Loaders) -> None:
        options, ranks = self.options, self._ranks
        self.settings = options.settings()
        self.unmanaged = Unmanaged(self.settings.unmanaged)
        self.policies, self.periodic = options.exit_policies(), options.periodic_policies()
        check_that_one_may_enter(hears_signals=any(policy.signals for policy in self.policies))
        """What this guard really saves: not all that `options` say under `prove`."""
        self.evaluates = not self.periodic and bool(self.policies) and all(p.kind == "eval" for p in self.policies)
        """The guard says itself that it does not train."""
        self._open_log(stack)
        self.proof = None if ProveSettings.from_env().control is None else observers().open_proof(ranks)
        """What looks at a run under `prove` or `drill`; None: this is an ordinary run."""
        self._open_directories(stack)
        loaders.begin(stack, is_again=self._is_again)
        copies = RedundancySettings.from_env().with_copies(self.options.redundancy).copies
        self._folders = RankDirectories(self._directories, self._trust, ranks, apart=copies > 1)
        self._open_saver()

    def meet(
        self, stack: ExitStack, exchange: Exchange, last_parts: Sequence[Part] = (), kept: Sequence[object] = ()
    ) -> None:
        """All ranks together: agree on what to resume from, and load it. `last_parts`: for the last meeting. `kept`:
        what a layer above keeps."""
        if self._problem is not None:
            raise self._problem
        self._exchange, self._last_parts, self._kept = exchange, last_parts, kept
        if self._is_ahead:
            self._hold_directories()
        options, place = self.options, self._place
        self._entry = None if place is None else place.entry
        if self._ranks.world_size > 1:
            meet(exchange, "directories", [self._folders])
        stack.callback(self.collector.leave_head)
        self.around = Connections(
            stack,
            self._directories,
            self.saver,
            options.snapshot_every,
            options.redundancy,
            exchange,
            "" if self.proof is not None else self.settings.archive if options.archive is None else options.archive,
            home=self._folders.home,
            evaluates=self.evaluates,
            member=None if place is None else place.member,
        )
        self.start = self._restore()
        """What the ranks have agreed on, and loaded."""
        self._begin_schedules()

    def shared_modules(self) -> list[nn.Module]:
        """The modules of which other ranks hold the same weights, so that a rank keeps what is its own at each
        boundary."""
        return outermost_replicas(self.targets, self.ddp) if self.saver.replicated else []

    def _open_log(self, stack: ExitStack) -> None:
        ranks = self._ranks
        self.log_filter = RankFilter(rank=ranks.rank, world_size=ranks.world_size, attempt=ranks.attempt)
        if (console := attach_console(self.log_filter, self.settings.log_level)) is not None:
            stack.callback(logger.removeHandler, console)
        self.relay = LogRelay()
        stack.callback(self.relay.close)
        self.relay.open()
        self.closing = stack.enter_context(ExitStack())
        """Closed last: closing what comes below may take long, and the deadline must be kept meanwhile."""

    def _open_directories(self, stack: ExitStack) -> None:
        """Make and lock the directories; `prove` has others in their place."""
        ranks = self._ranks
        wanted = [self.options.folder, *(p.directory for p in self.policies), *(p.directory for p in self.periodic)]
        places = wanted
        if self.proof is not None:
            places = self.proof.redirected(wanted)
            self.policies = tuple(replace(policy, after_save=None) for policy in self.policies)
        self._may_be_full = self._is_again or ranks.attempt > 0  # what goes on needs no disk before its next save
        sharing, may_be_full = self.options.sharing(), self._may_be_full
        resolved, self._trust = prepare_directories(places, ranks, sharing, may_be_full=may_be_full)
        self.resolved: dict[Path, Path] = {p: resolved[place] for p, place in zip(wanted, places, strict=True)}
        """The resolved directory of each one that the program names."""
        self._directories = list(dict.fromkeys(self.resolved.values()))
        self._locks = stack.enter_context(ExitStack())  # given back when all else is closed
        if not self._is_ahead:
            self._hold_directories()
        first = self._directories[0]
        self._events = EventLog(
            first / EVENTS_FILE, attempt=ranks.attempt, rank=ranks.rank, owners=self._trust.of(first)
        )
        self.log_filter.events = self._events
        stack.callback(self._events.close)
        self._events.write_aside()

    def _hold_directories(self) -> None:
        """The process whose place this one takes may still be on its way out."""
        if not self.evaluates:
            grace_s, job = self.settings.grace_s, RejoinSettings.from_env().job
            hold_directories(self._locks, self._trust, self._ranks, grace_s=grace_s, joins=self._is_again, job=job)

    def _open_saver(self) -> None:
        """Look at what is to be saved, and at how it is spread over the ranks."""
        options, ranks, targets = self.options, self._ranks, self.targets
        self.collector = Collector(targets)
        if not self._is_again:  # the ranks of this job have found room for it, and a form
            check_state_and_space(self.collector, self._directories, may_be_full=self._may_be_full)
        self.ddp = ddp_modules(targets)
        self.collector.broadcasts = BufferBroadcasts(self.ddp)
        replicas, by_hand = replica_ranks(targets, self.ddp), ByHand(options.layouts or {}, ranks)
        self.collector.set_parallel_setup(ParallelSetup(ranks.rank, ranks.world_size, replicas, by_hand))
        self.saver = Saver(
            self.collector,
            ranks,
            self._events,
            resolved=self.resolved,
            replicated=self.collector.is_replicated,
            trust=self._trust,
            names=job_names(options.prefix, [*self.policies, *self.periodic]),
            unmanaged=self.unmanaged,
        )

    def _begin_saver(self, start: Start) -> None:
        """Give it what the ranks have found out together."""
        saver, around = self.saver, self.around
        saver.coordinates["generation"] = start.generation
        if start.fault_report:
            saver.coordinates["fault_report"] = start.fault_report
        saver.page, saver.mirror, saver.together = around.page, around.mirror, self._together
        if around.archive is not None:
            saver.archive = around.archive
            saver.coordinates["writers"] = around.archive.part.writers
        saver.gone = start.peers.look
        saver.keep_in_memory = lambda timeout_s: around.keep_in_memory(timeout_s, saver.gone())
        if start.resumed is not None:
            saver.go_on_from(start.resumed.checkpoint.info)

    def _begin_schedules(self) -> None:
        """Periodic saves may depend on the clock."""
        page, place = self.around.page, self._place

        def tell(seconds: int) -> None:
            if self._ranks.rank == 0:
                page.set(save_every_s=seconds)

        for number, policy in enumerate(self.periodic):
            if isinstance(policy, PeriodicSave):
                name = "" if place is None else f"{place.name}/{number}"
                policy.begin(self._ranks, tell, name=name)

    def _parts(self) -> list[Part]:
        more = [] if self._place is None else self._place.parts([*self.targets.values(), *self._kept])
        return [*self._last_parts, self._together.part, *([self._uneven] if self.saver.replicated else []), *more]

    @cached_property
    def _uneven(self) -> UnevenModules:
        # In a recovery in place the ranks that live on have told it.
        return UnevenModules(self.collector, self.unmanaged, tells=self._entry is None)

    @cached_property
    def _together(self) -> DividedSaves:
        """Whether and with which other ranks this one saves at a stop."""
        named = [*(policy.directory for policy in self.policies), *(policy.directory for policy in self.periodic)]
        part = SavesPart(
            self.policies,
            self.periodic,
            [self.resolved[directory] for directory in named],
            self.saver.expected_bytes,
            divides=self.saver.replicated and self.around.mirror is None,
            mode=SavingSettings.from_env().divide,
        )
        return DividedSaves(self._exchange, self._ranks, self.collector, part)

    def meet_last(self) -> None:
        """Every rank is ready to train."""
        meet(self._exchange, "entered", self._parts())
        self.saver.lacked = self._uneven.lacked
        trains = self.proof is None and self._entry is None and not self.evaluates
        if self._ranks.rank == 0 and trains and not (self.periodic or self.around.takes_snapshots):
            by_callbacks = self.options.policies is not None
            logger.info(
                "nothing is saved between the stops: SIGKILL or a power cut costs all steps since this start. %s "
                "saves meanwhile",
                "A ModelCheckpoint among the callbacks" if by_callbacks else 'Guard(save_every="10min")',
            )

    def _restore(self) -> Start:
        """Meet the other ranks and load what they have planned together."""
        place = self._place
        start = start_job(
            self._directories,
            look_in=self._folders.all,
            resume=self.options.resume,
            collector=self.collector,
            targets=self.targets,
            job=self.saver,
            around=self.around,
            platform=PlatformAtStart(self._ranks, self.saver.flags),
            risks=self.unmanaged,
            ddp=self.ddp,
            boundary=None if place is None else place.boundary(),
        )
        self.log_filter.attempt = start.attempt
        self._begin_saver(start)
        self.unmanaged.inherit(start.notes)
        if (resumed := start.resumed) is not None:
            if resumed.plan.resharded:
                self.collector.loop = without_streams(self.collector.loop)  # they are another rank's
            info = resumed.checkpoint.info
            self.unmanaged.certificate, self.unmanaged.not_kept = tuple(info.certificate), info.not_kept
            if info.kind == "final":
                logger.info("that training had ended: what follows it runs again, and more steps if its loop has them")
        return start
