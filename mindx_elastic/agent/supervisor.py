"""The agent proper: torch's `LocalElasticAgent` with another way to start, watch and stop its workers.

Rendezvous, ranks, roles, logs and environment stay torch's. Ours are: the shim that ties each worker to the agent
(`child`), the loop that waits for events instead of sleeping (`attempt`), graceful stops, exit codes that tell what
happened (`endings`), and the decision whether another restart helps (`restarts`).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from mindx_elastic.agent.attempt import Attempt, AttemptContext
from mindx_elastic.agent.endings import GRACEFUL_CODES, Ending
from mindx_elastic.agent.forked_start import ForkedStart
from mindx_elastic.agent.hang import HangWatch
from mindx_elastic.agent.history import render
from mindx_elastic.agent.inbox import SignalInbox
from mindx_elastic.agent.last_lines import LastLines, exception_in
from mindx_elastic.agent.ledger import Ledger, print_block
from mindx_elastic.agent.metrics import Metrics
from mindx_elastic.agent.nodes import HostLostError, Membership
from mindx_elastic.agent.options import AgentOptions
from mindx_elastic.agent.recovery import Recovery
from mindx_elastic.agent.replacements import Replacements
from mindx_elastic.agent.restarts import CrashLoop, Restarts
from mindx_elastic.agent.shrinking import Shrinking
from mindx_elastic.agent.slow import SlowWatch
from mindx_elastic.agent.stop_files import StopFiles
from mindx_elastic.agent.workers import Workers
from mindx_elastic.agreement.hosting import host_store
from mindx_elastic.alarm.alarm import signal_name
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY, EXIT_USAGE, exit_code_of_signal
from mindx_elastic.cluster.messages import Group
from mindx_elastic.config import RejoinSettings
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.status_page import Status
from mindx_elastic.errors import UsageError
from mindx_elastic.memory.agent_folder import AgentFolder, LostFolderError
from mindx_elastic.rejoin.board import Board, board_key

__all__ = ["Supervisor"]

_FLUSH_POLL_S = 0.5
_MAX_ERROR_BYTES = 1 << 20
_OWN_ERRORS, _MOST_OF_ERROR = f"{UsageError.__module__}.", 300


class Supervisor(LocalElasticAgent):
    """One node's agent. Main thread only: a worker gets its death signal when the *thread* that started it ends."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        options: AgentOptions,
        folder: AgentFolder,
        inbox: SignalInbox,
        events: EventLog,
        stop_files: StopFiles,
        lines: LastLines,
        membership: Membership | None,
        forks: ForkedStart,
        shrinking: Shrinking | None = None,
        **torch_arguments: Any,
    ) -> None:
        """membership: of this node in a job of several; None: there can be no others. shrinking: goes on with fewer
        workers where one cannot be replaced; None: there are always all of them."""
        self._replacements: Replacements | None = None
        super().__init__(spec, lines.specs(logs_specs), **torch_arguments)
        self._lines = lines
        self.ledger = Ledger(events)
        self.ending = Ending(outcome="failed", code=EXIT_TEMPORARY, cause="nothing was started")
        """How it all ended."""
        self.metrics: Metrics | None = None
        """Is told what the pages say; None: not wanted."""
        self.arenas: set[str] = set()
        """Folders of shared memory that the workers have used."""
        self.error_file = ""
        """What the first failed worker wrote about its exception; empty: nothing."""
        self._options, self._folder, self._inbox, self._events = options, folder, inbox, events
        self._stop_files, self._membership, self._forks = stop_files, membership, forks
        self._shrinking = shrinking
        self._hang = HangWatch(options.hang_timeout_s)
        self._slow = SlowWatch()
        self._crash_loop = CrashLoop(options.crash_loop)
        self.leaves_nothing = False
        """The last attempt was a refused one that had started over: what is in memory is of no use."""
        self.is_hopeless = False
        """The job was stopped because no restart would get it further."""
        self._restarts = Restarts(spec.max_restarts, options.restarts_window_s)
        self._number = -1
        self.directories: set[Path] = set()
        """Checkpoint directories of this node's ranks."""
        self._address = spec.local_addr or socket.getfqdn()
        self._hosted: Any = None
        """The workers' store of this attempt, where the agent hosts it."""
        self._shutdown_timeout = math.ceil(options.grace_s)
        self._error_files: dict[int, str] = {}

    # --- the run ------------------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        attempt: Attempt | None = None
        self._resize()
        try:
            while True:
                self._hold_start()
                if self._stops_for_notice():
                    break
                self._initialize_workers(self._worker_group)
                attempt = self._run_attempt()
                goes_on = self._goes_on(attempt)
                if self._membership is not None:
                    self._membership.note_end(self.ending)
                if not goes_on:
                    break
                # Another node's failures are in it, too: it may be lower than what this agent has left.
                self._remaining_restarts = max(0, self._remaining_restarts - (self.ending.outcome == "failed"))
                self._resize()
        except SignalException as stop:
            if self.ending.outcome != "finished":
                code = exit_code_of_signal(stop.sigval)
                self.ending = Ending(outcome="stopped", code=code, cause=signal_name(stop.sigval))
                self._stops_for_notice()
        except RendezvousError as error:
            self.ending = self._end_without_nodes(error)
        except LostFolderError as error:
            cause = f"{self.ending.cause}; then {error}"
            self.ending = Ending(outcome="failed", code=EXIT_TEMPORARY, cause=cause)
        finally:
            self._forks.close()
        return self._result(attempt)

    def _hold_start(self) -> None:
        """The platform may still be clearing the devices."""
        held = False
        while self._stop_files.flushing():
            if not held:
                logger.warning("the platform is clearing faults (FaultFlushing in reset.json): the start is held back")
                self._events.emit("hold", reason="FaultFlushing")
                held = True
            time.sleep(_FLUSH_POLL_S)
            self._check_stop()
        if held:
            logger.info("the platform has cleared the faults: starting")

    def _check_stop(self) -> None:
        """While no workers run. Raises SignalException where the job is to stop."""
        self._inbox.check()
        if (notice := self._stop_files.notice()) is not None:
            raise SignalException(notice.reason, sigval=signal.SIGTERM)

    def _stops_for_notice(self) -> bool:
        """Whether this machine is about to be taken away, so that no workers are started on it any more."""
        notice = self._stop_files.notice()
        if notice is not None:
            logger.warning("%s: no workers are started", notice.reason)
            self._events.emit("fault", reason=notice.reason, kind=notice.kind)
            self.ending = Ending(outcome="stopped", code=EXIT_TEMPORARY, cause=notice.reason)
        return notice is not None

    def _run_attempt(self) -> Attempt:
        membership = self._membership
        attempt = self._begin_attempt()
        try:
            self.ending = attempt.run()
            if self.ending.outcome == "finished" and membership is not None:
                self.ending = membership.end_together(self.ending, self._inbox)
            elif self.ending.outcome == "failed" and membership is not None:
                self.ending = membership.stopped_elsewhere or self.ending
        finally:
            if self._replacements is not None:
                self._replacements.close()
            self._note_arenas(attempt.workers.last_statuses())
            attempt.workers.close()
        self.ledger.end_attempt(attempt, self.ending)
        if self.metrics is not None:
            self.metrics.look(attempt.workers.last_statuses(), self.ledger.records)
        if self._shrinking is not None:
            self._shrinking.end_attempt(attempt, self.ending, self.arenas)
        self._shutdown(signal.SIGKILL, 1)  # only workers that survive SIGKILL are left
        return attempt

    def _begin_attempt(self) -> Attempt:
        """The workers run."""
        group, shrinking = self._worker_group, self._shrinking
        ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        workers = Workers({ranks[i]: h.proc for i, h in handlers.items()}, self._folder.path, self._error_of)
        world_size = group.workers[0].world_size
        self._stop_files.faults.world_size = world_size
        self._hang.reset()
        self._slow.reset()
        self.ledger.start_attempt(
            self._number,
            world_size=world_size,
            num_workers=len(ranks),
            node=int(group.group_rank or 0),
            restarts=self._restarts.total,
            full_size=None if shrinking is None else shrinking.places.count,
            why_fewer="" if shrinking is None else shrinking.reason,
        )
        context = AttemptContext(
            folder=self._folder,
            inbox=self._inbox,
            hang=self._hang,
            slow=self._slow,
            stop_files=self._stop_files,
            membership=self._membership,
            events=self._events,
            grace_s=self._options.grace_s,
            stacks=self._options.run_dir / "stacks",
            recovery=self._make_recovery(workers),
            on_look=self._look,
        )
        return Attempt(workers, context, number=self._number)

    def _make_recovery(self, workers: Workers) -> Recovery | None:
        """What replaces dead ranks in place in this attempt; None: nothing does."""
        if not self._options.in_place:
            return None
        group, scope = self._worker_group, str(self._number)
        store: Any = PrefixStore(f"mindx/rejoin/{scope}", self._hosted)
        self._replacements = Replacements(
            self._forks,
            self._pcontext,
            {worker.global_rank: worker.local_rank for worker in group.workers},
            folder=self._folder.path,
            num_spares=self._options.spares,
        )

        def board_of(generation: int) -> Board:
            writer = len(group.workers)  # the number after the last rank
            return Board(store, key=board_key(), scope=f"{scope}/{generation}", writer=writer)

        return Recovery(
            workers,
            board_of,
            self._replacements.start,
            timeout_s=self._options.rejoin_timeout_s,
            most=RejoinSettings.from_env().most,
            note=self.ledger.note_recovery,
        )

    def _goes_on(self, attempt: Attempt) -> bool:
        """Whether to start again after this ending; says why not."""
        ending = self.ending
        if ending.outcome == "rehearsed" and ending.first is not None and ending.first.status is not None:
            os.environ["MINDX_REHEARSED"] = str(ending.first.status.saved_step)
        if ending.outcome in ("membership", "rehearsed"):
            self._events.emit("restart", reason=ending.cause)
            return True
        if ending.outcome != "failed":
            return False
        if attempt.abandoned:
            logger.error("no restart: ranks %s could not be ended and hold their devices", attempt.abandoned)
            return False
        failure = self.ledger.failure(attempt, ending)
        self.leaves_nothing = failure.leaves_nothing
        verdict = self._crash_loop.judge(failure)
        allowed = verdict.action != "stop" and self._restarts.take(time.monotonic())
        if verdict.explanation:
            for line in verdict.explanation.splitlines():  # a record is one line
                logger.error("%s", line)
            self._events.emit("crash_loop", reason=verdict.explanation, outcome=verdict.action)
        if not allowed:
            self.is_hopeless = verdict.action == "stop"
            if verdict.action != "stop":
                logger.error("no restart: %s", self._restarts.why_not)
            return False
        print_block(render(self.ledger.records, self.ledger.recoveries))
        logger.warning("restart %s", self._restarts.count)
        self._events.emit("restart", reason=ending.cause, restart=self._restarts.total)
        return True

    def _resize(self) -> None:
        """As many workers as there are places for."""
        if self._shrinking is not None:
            self._worker_group.spec.local_world_size = self._forks.num_workers = self._shrinking.size
            self._shrinking.prepare()

    def _end_without_nodes(self, error: Exception) -> Ending:
        over = None if self._membership is None else self._membership.over
        if self._membership is not None and (stopped := self._membership.stopped_elsewhere) is not None:
            return stopped
        if over is not None and over.code == 0 and self._number >= 0:
            return Ending(outcome="finished", code=0)  # the others have done what was left without this node
        if isinstance(error, HostLostError):  # the last line of the job says it
            what = str(error)
        else:
            what = f"the nodes cannot meet: {type(error).__name__}: {error}".rstrip(": ")
            logger.error("%s", what)
        if self._number >= 0 and self.ending.outcome == "stopped":
            return self.ending
        cause = f"{self.ending.cause}; then {what}" if self._number >= 0 else what
        code = EXIT_USAGE if over is not None and over.code == EXIT_USAGE else EXIT_TEMPORARY
        return Ending(outcome="failed", code=code, cause=cause, elsewhere=True)

    def note_error(self, error: Exception) -> None:
        """The agent itself has failed: that is how it all ended."""
        what = f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0]
        self.ending = Ending(outcome="failed", code=1, cause=f"an error of the agent ({what})")

    def _result(self, attempt: Attempt | None) -> RunResult:
        """What torch's own bookkeeping wants to know."""
        if self.ending.outcome == "finished":
            values = dict.fromkeys(worker.global_rank for worker in self._worker_group.workers)
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        failures = {}
        local = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        for end in attempt.workers.exits if attempt is not None else ():
            if end.code != 0 and end.rank in local:
                file = self._error_file(local[end.rank])
                failures[end.rank] = ProcessFailure(
                    local_rank=local[end.rank], pid=end.pid, exitcode=end.code, error_file=file
                )
        if self.ending.first is not None and self.ending.first.rank in local:
            self.error_file = self._error_file(local[self.ending.first.rank])
        return RunResult(state=WorkerState.FAILED, failures=failures)

    # --- torch's steps, changed ---------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """The nodes have met at a table of ours (`agent.nodes`), and a job of one node uses no connection at all: a
        firewall that is reloaded, a network namespace that is rebuilt or ``ss -K`` would break it. Torch's own dynamic
        rendezvous never connects again, and its store ends with its host."""
        spec = worker_group.spec
        group = self._meet(spec.local_world_size, spec.max_restarts - self._remaining_restarts)
        # TORCHELASTIC_RESTART_COUNT is the same on all nodes: an agent that first hears of another one's restart takes
        # it for a change of the nodes, and workers with different counts would do different things.
        self._remaining_restarts = max(0, spec.max_restarts - group.restarts)
        told: Any = worker_group
        told.store = HashStore()  # torch's agent asks for one, and for nothing in it
        told.group_rank, told.group_world_size = group.node, group.nodes
        told.master_addr, told.master_port = spec.master_addr or group.host, spec.master_port or group.port
        told.workers = [
            Worker(
                local_rank=local,
                global_rank=group.rank + local,
                role_rank=group.role_rank + local,
                world_size=group.size,
                role_world_size=group.role_size,
            )
            for local in range(spec.local_world_size)
        ]

    def _meet(self, count: int, restarts: int) -> Group:
        """The group of the next attempt, to which this node brings `count` workers."""
        if self._options.in_place:  # of one node
            # One for each round: a new attempt must not find the addresses of the old one's ranks.
            self._hosted = host_store(self._address)
            port = int(self._hosted.port)
        else:
            with _reserve_port() as reserved:
                port = reserved.getsockname()[1]
                if self._membership is not None:
                    return self._membership.meet(count, restarts, port, self._check_stop)
        return Group(
            generation=0, rank=0, size=count, role_size=count, restarts=restarts, host=self._address, port=port
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._folder.forget_workers()
        self._number += 1
        os.environ["MINDX_JOB_ID"] = "" if self._membership is None else self._membership.job
        os.environ["MINDX_ATTEMPT"] = str(self._number)
        self._forks.prepare(self._number, self._check_stop)
        try:
            with self._forks.start():
                ids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._inbox.install()  # torch has just put its own handlers there
        self._error_files = dict(getattr(self._pcontext, "error_files", {}))
        return ids

    def _stop_workers(self, worker_group: WorkerGroup, *more: Any) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None, *more: Any) -> None:
        """Stop what torch runs for the workers (log tails, watchdog), which have ended unless something broke."""
        if self._pcontext is None:
            return
        timeout = math.ceil(self._options.grace_s) if timeout is None else timeout
        try:
            super()._shutdown(death_sig, timeout)
        except TypeError:  # older than the second argument
            super()._shutdown(death_sig)
        self._pcontext = None

    # --- small parts --------------------------------------------------------------------------------------------------

    def _look(self, statuses: Mapping[int, Status]) -> None:
        self.ledger.look(statuses)
        self.ledger.look_at_pause(statuses)
        self._note_arenas(statuses)
        if self.metrics is not None:
            self.metrics.look(statuses, self.ledger.records, self._slow.named.values())
        self._forks.look(statuses)
        if self._replacements is not None:
            self._replacements.look(statuses)
        if self._shrinking is not None:
            self._shrinking.look(statuses)

    def _note_arenas(self, statuses: Mapping[int, Status]) -> None:
        """While the ranks live: the page of one that is replaced is gone with it."""
        before = len(self.arenas)
        self.arenas.update(status.arena for status in statuses.values() if status.arena)
        self.directories.update(Path(status.directory) for status in statuses.values() if status.directory)
        if self.arenas and not before:
            with suppress(RuntimeError):  # the system gives no thread: it is imported at the end then
                threading.Thread(target=_import_for_the_end, name="mindx-import", daemon=True).start()

    def _error_file(self, local_rank: int) -> str:
        return str(self._error_files.get(local_rank) or "")

    def _error_of(self, rank: int, code: int) -> str:
        """A rank's exception, from torch's ``@record`` or its stderr: one line, or nothing. Keeps its last lines."""
        local = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        said = ""
        if code not in GRACEFUL_CODES and rank in local:
            how = f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
            stderr = str(getattr(self._pcontext, "stderrs", {}).get(local[rank]) or "")
            said = exception_in(self._lines.keep(rank, local[rank], stderr, f"attempt {self._number}, {how}"))
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(self._error_file(local[rank]), "rb") as file:
                message = json.loads(file.read(_MAX_ERROR_BYTES))["message"]
            said = str(message["message"] if isinstance(message, dict) else message)
        return printable(said.strip().partition("\n")[0].removeprefix(_OWN_ERRORS)[:_MOST_OF_ERROR])


def _reserve_port() -> socket.socket:
    """A free port, which the system gives to nobody else until the socket is closed; a server may listen there."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _import_for_the_end() -> None:
    """Import what brings memory to disk and draws the account. Not at the start, which it would delay, nor at the end:
    the disk that it lies on may hang then, or have another version."""
    for name in ("rich.console", "rich.table", "mindx_elastic.agent.holder"):
        importlib.import_module(name)
