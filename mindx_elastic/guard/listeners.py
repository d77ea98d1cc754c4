"""Where alarms come from: signals, flag files, fault reports, the other ranks and their deaths, the agent.

Each of them becomes an alarm of the guard's `Stopper`, in the watcher thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.alarm.alarm import Alarm
from mindx_elastic.alarm.peers import PeerWatch
from mindx_elastic.alarm.signals import SignalHandlers
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import GateState
from mindx_elastic.config import FaultPaths, RankInfo, Settings
from mindx_elastic.core.events import logger
from mindx_elastic.core.first_process import DROPPED, WITH_AN_INIT
from mindx_elastic.core.printable import printable
from mindx_elastic.guard.agent_link import AgentLink
from mindx_elastic.guard.policy import ExitPolicy
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.memory.agent_folder import CONTROL_SIGNAL, PAUSE, RESUME
from mindx_elastic.platforms.fault_watch import FaultWatch
from mindx_elastic.platforms.flag_file import FlagFile
from mindx_elastic.platforms.launchers import at_a_stop

__all__ = ["Listeners"]

_FAULT_POLL_S = 1.0
_FILES_S = 1.0  # a look at a file that takes longer is abandoned
_IN_A_THREAD = (
    "this guard is in thread %r, where no signal is heard: a flag file, request_stop() or the death of another rank "
    'stops it; what a SIGTERM would cost is bounded by Guard(save_every="10min")'
)


class Listeners:
    """Turns what this process hears into alarms of one `Stopper`, in the watcher thread."""

    def __init__(self, settings: Settings, policies: Sequence[ExitPolicy], ranks: RankInfo) -> None:
        self._settings, self._policies, self._ranks = settings, policies, ranks
        self.early_flags: list[FlagFile] = []
        """Flag files that were set before the guard was entered: they stop the job at its first boundary."""
        self._link: AgentLink | None = None
        self.handlers: SignalHandlers

    def start(
        self, stack: ExitStack, stopper: Stopper, exchange: Exchange, peers: PeerWatch, link: AgentLink | None
    ) -> None:
        """Main thread. `stack` restores the handlers at the end."""
        self._watcher, self._stopper, self._link = stopper.watcher, stopper, link
        alarms, post = stopper.alarms, self._watcher.post
        is_sealed = exchange.is_sealed
        exchange.listen(
            lambda request: post(lambda: stopper.hear(alarms.of_peer(request, is_sealed=is_sealed))),
            lambda order: post(lambda: stopper.pauses.hear_order(order)),
        )
        peers.start(self._watcher, stopper.hear_death)
        self._watch_files(stack)
        signals = [n for p in self._policies if "signal" in p.alarms for n in p.signals]
        self._own_signals = frozenset(signals)
        if link is not None:
            signals += [CONTROL_SIGNAL, signal.SIGTERM]  # an agent stops its workers with it, whatever the policies say
            if link.agent_fd >= 0:  # also where a script runs between the agent and this process
                self._watcher.watch(link.agent_fd, stopper.hear_orphan)
            if link.is_orphan():  # the agent has died during the start: no signal and no descriptor says so
                post(stopper.hear_orphan)
        self.handlers = SignalHandlers(  # set before the first signal can arrive
            signals,
            self._watcher,
            is_updating=lambda: stopper.update_gate.state is not GateState.CLEAN,
            patience_s=self._settings.grace_s / 2,
        )
        stack.enter_context(self.handlers)
        if self._ranks.rank == 0:
            for fact, remedy in at_a_stop(os.environ):
                logger.info("%s. %s", fact, remedy)
        if threading.current_thread() is not threading.main_thread() and self._ranks.rank == 0:
            logger.info(_IN_A_THREAD, threading.current_thread().name)
        if os.getpid() == 1:
            logger.info("%s. %s", DROPPED, WITH_AN_INIT)

    def hold(self) -> None:
        """Training thread: the guard is left, and entered again in a moment. What asks for a stop meanwhile is answered
        then. Not what an agent sends to a worker without a guard, to end it."""
        alarms, link = self._stopper.alarms, self._link

        def tell(signum: int) -> None:
            if link is not None:
                link.page.set(asked_code=alarms.of_signal(signum).asked_code)

        self.handlers.hold(self._own_signals - {signal.SIGTERM, signal.SIGINT}, tell)

    def answer_held(self) -> None:
        """Training thread: the guard is open."""
        for signum in self.handlers.held:
            self._watcher.post(lambda signum=signum: self._stopper.hear_signal(signum))  # type: ignore[misc]

    def _watch_files(self, stack: ExitStack) -> None:
        """Look at flag files and fault reports in a separate thread: where their file system hangs, signals are
        heard all the same."""
        files = Watcher(lambda signum: None, name="mindx-files", patience_s=_FILES_S)
        flags = [p for p in self._policies if p.flag_file is not None and "flag" in p.alarms]
        if self._settings.graceful_exit is False:
            flags = []
        for policy in flags:
            self._watch_flag(policy, files)
        if self._watch_faults(files) or flags:
            files.start()
        stack.callback(files.stop)

    def _hear(self, alarm: Alarm) -> None:
        """Any thread."""
        self._watcher.post(lambda: self._stopper.hear(alarm))

    def _watch_flag(self, policy: ExitPolicy, files: Watcher) -> None:
        assert policy.flag_file is not None
        # An answered flag is noted in the file that the next start resumes from. Where there is none, none is noted.
        answered = self._stopper.saver.flags if policy.save and policy.kind != "eval" else None
        flag = FlagFile(policy.flag_file, answered=answered)
        if flag.poll():
            logger.warning(
                "flag file %s was set before this start: the job stops at its first boundary, and saves it", flag.path
            )
            self.early_flags.append(flag)

        def look() -> None:
            if flag.poll():
                self._hear(self._stopper.alarms.of_flag(flag.path))

        files.every(self._settings.flag_poll_s, look)

    def raise_early_flags(self) -> bool:
        """Training thread, at the first boundary: raise the alarms of `early_flags`. Returns whether there are any.

        Not earlier: nothing could be saved, and the grace period must not run while the first step is compiled.
        """
        flags, self.early_flags = self.early_flags, []
        still = [flag for flag in flags if self._stopper.saver.flags.is_set(flag.path)]
        for flag in still:
            self._hear(self._stopper.alarms.of_flag(flag.path))
        return bool(still)

    def _watch_faults(self, files: Watcher) -> bool:
        """Watch for the platform's fault reports. False: there is no need. With an agent, it does that for its
        workers."""
        paths = FaultPaths.from_env()
        wanted = any("fault" in policy.alarms for policy in self._policies)
        usual = (FaultPaths.fault_dir, FaultPaths.reset_dir)
        # A folder that the user has named may be mounted, or written, later than the program starts.
        is_there = paths.fault_dir.is_dir() or paths.reset_dir.is_dir() or (paths.fault_dir, paths.reset_dir) != usual
        if self._link is not None or not wanted or not is_there:
            return False
        watch = FaultWatch(paths, world_size=self._ranks.world_size)

        def look() -> None:
            if (event := watch.poll()) is not None:
                self._hear(self._stopper.alarms.of_fault(event.reason))

        files.every(_FAULT_POLL_S, look)
        return True

    def hear_signal(self, signum: int) -> None:
        """Watcher thread: `signum` has arrived in this process."""
        stopper, link = self._stopper, self._link
        if stopper.finished or not self.handlers.hear(signum):
            return
        if link is not None and signum == CONTROL_SIGNAL:
            for order in link.orders():
                self._hear_order(order)
        elif link is not None and signum == signal.SIGTERM and link.is_orphan():
            stopper.hear_orphan()  # sent by the kernel, see `agent.child`
        elif signum in self._own_signals:
            stopper.hear_signal(signum)
        else:
            stopper.hear(stopper.alarms.of_agent_signal(signum))

    def _hear_order(self, order: Mapping[str, Any]) -> None:
        stopper = self._stopper
        if order["kind"] in (PAUSE, RESUME):
            stopper.pauses.hear(order["kind"], printable(order["reason"]), order["seq"])
        else:
            stopper.hear(stopper.alarms.of_agent(order))
