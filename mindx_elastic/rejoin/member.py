"""The worker's side of an in-place recovery: out of the collectives, agree, new connections, go on.

One `Member` per process (`find_member`), and one `Host` per entered guard. Two threads use it: the watcher hears of a
death and cuts the connections; the training thread comes out and does the rest (`Member.leave`), with the guard still
open: as long as the donor's state is not in shared memory, this rank can still save its own boundary. After that it
leaves its guard and enters it again, with a `GuardEntry` in place of files. The new process begins there
(`Member.join`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.agreement.connect import open_connection
from mindx_elastic.agreement.sealed import NotOursError
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import MismatchError
from mindx_elastic.memory.memory import Memory
from mindx_elastic.rejoin import groups, joiner, nccl, spare
from mindx_elastic.rejoin.before_call import ObjectsBeforeCall
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.failures import Failures, RejoinFailed
from mindx_elastic.rejoin.groups import DdpModules
from mindx_elastic.rejoin.protocol import RecoveryVerdict, Report, decide
from mindx_elastic.rejoin.sockets import SocketsPart
from mindx_elastic.rejoin.spare_warmup import share_orders

if TYPE_CHECKING:
    from mindx_elastic.guard.saver import Saver

__all__ = [
    "PARTS_DIFFER",
    "GuardEntry",
    "Host",
    "LeavesToRejoin",
    "Member",
    "UnfitSpareError",
    "find_member",
    "join_job",
    "tell_once",
]

PARTS_DIFFER = "the ranks hold different parts of the state, so a dead one takes its part with it"
_HAS_HOOK = "DDP has a communication hook, which a new process would call alone when it lays out its buckets"
_CUT_AGAIN_S = 0.01
_HEARD_S = 5.0
_LOOK_S = 0.05
_WAIT_S = 0.5
_LONGEST = 1000


class LeavesToRejoin(BaseException):
    """Takes the training thread out of the program's loop at a boundary. Not an Exception, so that a program's
    ``except Exception`` does not swallow it; one that swallows everything meets it again at its next boundary."""


class UnfitSpareError(Exception):
    """This process was a spare, and another one must take the place; it has told the others nothing yet."""


class GuardEntry(NamedTuple):
    """What a rank enters its guard again with."""

    generation: int
    verdict: RecoveryVerdict
    where: Callable[[], Path]
    """The donor's snapshot in shared memory. In a new process it waits until the donor has put it there, and raises
    RejoinFailed where that does not come about: so it is asked for when the state is to be loaded, not before."""
    live: Mapping[str, Any] | None
    """This process's own state of the boundary; None: it takes state from memory."""
    info: Any = None
    """With `live`: its `CheckpointInfo`."""


class Host:
    """What a member needs of its guard while that is open. One per entered guard."""

    def __init__(
        self,
        saver: Saver,
        memory: Memory | None,
        gate: UpdateGate,
        step_gate: StepGate,
        watcher: Watcher,
        ddp: groups.DdpModules,
        objects: ObjectsBeforeCall,
        *,
        is_stopping: Callable[[], bool],
        peers_gone_soon: Callable[[], bool],
        end: Callable[[str], NoReturn],
    ) -> None:
        """`memory`: the rank's shared memory; None: there is none. `peers_gone_soon`: after a failed collective,
        whether another rank is gone, or will be in a moment. `end`: ends this process, because of what the text says,
        without a save and without a word to the others."""
        self._saver, self._collector, self._memory, self._objects = saver, saver.collector, memory, objects
        self._gate, self._step_gate, self._watcher = gate, step_gate, watcher
        self.is_stopping, self.peers_gone_soon, self.end = is_stopping, peers_gone_soon, end
        self.ddp = ddp

    def report(self) -> Report:
        saver, collector, rank = self._saver, self._collector, self._saver.ranks.rank
        self._gate.give_up()
        problem_of_devices = groups.devices.wait_aborted()
        if groups.devices.is_used and not problem_of_devices and (broken := nccl.broken_context()):
            nccl.end_process(broken)  # before it has reported: a new process takes its place
        if self._memory is not None:
            self._memory.finish_copy()
        with self._gate.hold(0.0) as problem:
            return Report(
                rank=rank,
                run_id=saver.events.run_id,
                attempt=saver.events.attempt,
                step=collector.position.step,
                clean=problem is None,
                groups=groups.digest(),
                orders=collector.gradient_order,
                lacked=saver.lacked,
                problem=problem_of_devices or self._problem() or self._objects.problem,
            )

    def _problem(self) -> str:
        """Why the ranks cannot go on in place from one boundary; empty: they can."""
        if self._collector.compiled.any:
            return "torch.compile has compiled part of the training, and only a restart compiles it the same again"
        if not self._saver.replicated:
            return PARTS_DIFFER
        if any(module._comm_hooks for _, module in self.ddp):
            return _HAS_HOOK
        return ""

    def live(self) -> tuple[Mapping[str, Any], Any]:
        """The state of the last boundary, and its header facts. The update gate is held."""
        return self._collector.state(), self._saver.describe("snapshot")

    def donate(self) -> Path:
        """Put the last boundary into shared memory; returns the file. Raises RejoinFailed."""
        path = None if self._memory is None else self._memory.donate()
        if path is None:
            raise RejoinFailed("the donor's state does not fit into shared memory")
        return path

    def call_soon(self, seconds: float, work: Callable[[], None]) -> None:
        """Run a function in the watcher thread after so many seconds."""
        self._watcher.call_at(time.monotonic() + seconds, work)

    def open_gate(self) -> None:
        """Let the training thread come out at its next boundary."""
        self._step_gate.close()
        self._step_gate.open_until(0)

    def orders(self) -> Mapping[str, list[int]]:
        """The order in which the gradients of each of `ddp` arrive; empty where one is not known yet, or cannot be."""
        orders = self._collector.gradient_order
        return orders if self.ddp and all(orders.get(name) for name, _ in self.ddp) else {}


class Member:
    """One per process."""

    def __init__(self, settings: RejoinSettings, ranks: RankInfo, agent: AgentInfo) -> None:
        self.ranks, self._timeout_s, self._folder = ranks, settings.timeout_s, agent.folder
        self.generation = settings.generation
        """The generation of the last recovery that this process took part in."""
        self.is_joiner = settings.generation > 0
        self.has_entered = False
        """A guard of this process has been entered."""
        self.page: Any = None
        """The status page, which stays over all recoveries."""
        self.arena: Any = None
        """The rank's shared memory, between a guard that is left and entered again: see `take_arena`."""
        self.sockets: SocketsPart | None = None
        self.laid_out: Mapping[str, list[int]] = {}
        """In a new process: the order in which gradients arrive, of the DDP modules of which it knows it already."""
        self._attempt = str(agent.attempt)
        self._shares_orders = ranks.local_rank == 0  # spares want them
        self._host: Host | None = None
        """While the guard is open."""
        self._failures: Failures | None = None
        self._is_early = False
        """A rank's death was heard while the guard was being entered."""
        self._lock = threading.Lock()
        self._wants_out = threading.Event()
        self._is_out = threading.Event()
        self._heard_at: float | None = None  # of the death: `time.time`
        self._store: Any = None
        self._orders: Mapping[str, Sequence[int]] = {}

    # --- the guard is open --------------------------------------------------------------------------------------------

    def parts(self) -> list[Any]:
        """For the last meeting of each entry: all connections are there by then."""
        self.sockets = SocketsPart()
        return [self.sockets]

    def take_arena(self) -> Any:
        """The arena that the guard before this one has left open; None: there is none. It is the caller's now."""
        arena, self.arena = self.arena, None
        return arena

    def opened(self, host: Host) -> None:
        """Training thread: the guard is open, and deaths will be heard."""
        self._connection()  # a new one may take the store seconds, when it looks up the name of the other end
        self._is_out.clear()
        self._failures = Failures([module for _, module in host.ddp])
        with self._lock:
            self._wants_out.clear()
            self._host = host
            is_early, self._is_early = self._is_early, False
        if is_early:
            host.call_soon(0.0, self.hear_death)

    def closed(self) -> None:
        """Training thread: the guard is closed, or will be in a moment."""
        with self._lock:
            self._host = None
        if self.sockets is not None:
            self.sockets.release()  # every rank is out, or the recovery is over
        if self._failures is not None:
            self._failures.close()
            self._failures = None

    @property
    def wants_out(self) -> bool:
        """Whether the training thread has to leave the program's loop. Any thread."""
        return self._wants_out.is_set()

    def comes_out_soon(self) -> bool:
        """Training thread, after a collective has failed and a rank is gone: the watcher hears of it in a moment,
        unless the job is being stopped."""
        end = time.monotonic() + _HEARD_S
        while not self._wants_out.wait(_LOOK_S) and time.monotonic() < end:
            if self._host is None or self._host.is_stopping():
                break
        return self.wants_out

    def hear_death(self) -> None:
        """Watcher thread: the process of another rank is gone."""
        with self._lock:
            host = self._host
            if host is None:  # the guard is being entered
                self._is_early = True
                return
            if self._wants_out.is_set():
                return
            self._heard_at = time.time()
            self._wants_out.set()
        host.open_gate()
        self._cut()

    def _cut(self) -> None:
        """Watcher thread, again and again: a collective may have been about to begin on another connection."""
        host, sockets = self._host, self.sockets
        if self._is_out.is_set() or host is None or sockets is None:
            return
        sockets.cut()
        groups.devices.abort()
        host.call_soon(_CUT_AGAIN_S, self._cut)

    # --- the training thread ------------------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Training thread, before a boundary is passed: raises LeavesToRejoin where the program has caught an error of
        the step that comes from another rank's death. What it did without the others is part of no boundary."""
        self._reach_devices()
        if self._shares_orders and self._host is not None and (orders := self._host.orders()):
            self._shares_orders = False
            share_orders(self._folder, self._attempt, orders)
        if self._must_leave():
            raise LeavesToRejoin
        if self._failures is not None:
            self._failures.seen = False

    def before_update(self) -> None:
        """Training thread, before an optimizer steps: raises LeavesToRejoin where devices have not got all results, or
        the program has caught an error as of `at_boundary`: the state is still that of the last boundary here."""
        self._reach_devices()
        if self._must_leave():
            raise LeavesToRejoin

    def _reach_devices(self) -> None:
        if self._host is not None and not groups.devices.fence():
            raise LeavesToRejoin

    def at_batch(self) -> None:
        """Training thread, where a batch is asked for: a program that has caught what took it out does not go on."""
        if self._host is not None and (self.wants_out or self._must_leave()):
            raise LeavesToRejoin

    def _must_leave(self) -> bool:
        """Whether something has failed since the last boundary, and another rank has died. Or has left, where the job
        is being stopped: there is no recovery then, and `leave` says so."""
        host, failures = self._host, self._failures
        if host is None or failures is None or not failures.seen:
            return False
        if not self.wants_out and not failures.has_waited:
            failures.has_waited = not host.peers_gone_soon() or not (self.comes_out_soon() or host.is_stopping())
        return self.wants_out or not failures.has_waited

    def leave(self) -> GuardEntry:
        """Training thread, out of the program's loop, the guard open: agree with the others, and get what the next
        entry needs. Raises RejoinFailed where there is none: the rank stops as without recovery in place."""
        self._is_out.set()
        host = self._host
        assert host is not None
        generation = self.generation + 1
        try:
            entry = self._agree(self._board(generation), host, generation)
        except (RejoinFailed, NotOursError) as error:
            self.refuse(generation, str(error))
            raise RejoinFailed(str(error)) from None
        except Exception as error:  # the store is gone, a connection cannot be made
            text = printable(f"{type(error).__name__}: {error}", _LONGEST).partition("\n")[0]
            logger.debug("the recovery has failed", exc_info=True)
            self.refuse(generation, text)
            raise RejoinFailed(text) from error
        self.closed()
        return entry

    def refuse(self, generation: int, reason: str) -> None:
        """Tell the coordinator why this rank does not go on; it ends the recovery, and need not wait for its time."""
        try:
            self._board(generation).refuse(generation, self.ranks.rank, reason)
        except Exception as error:
            logger.debug("the store does not take the reason: %s", error)

    def _agree(self, board: Board, host: Host, generation: int) -> GuardEntry:
        plan = self._wait(board, [f"{generation}/plan"], host)[f"{generation}/plan"]
        if plan.get("refusal"):
            raise RejoinFailed(str(plan["refusal"])[:_LONGEST])
        if board.write(f"{generation}/out/{self.ranks.rank}", host.report().to_json()).get("dead"):
            host.end(f"rank {self.ranks.rank} was taken for dead")  # and a new process has its place
        verdict = self._verdict(board, host, generation)
        live: Mapping[str, Any] | None = None
        info: Any = None
        if said := groups.reset_ddp(host.ddp):  # of those that lag as well: it makes DDP meet once more, all ranks
            raise RejoinFailed(said)
        # Before the state is copied: the new process opens its guard meanwhile.
        groups.connect(self._gloo_store(generation), self.ranks.rank, self._timeout_s)
        if self.ranks.rank == verdict.donor:
            self._donate(board, host, generation)
        if self.ranks.rank not in verdict.needy:
            live, info = host.live()
        found = self._get_state(board, host, generation)
        self.generation = generation
        return GuardEntry(generation=generation, verdict=verdict, where=lambda: found, live=live, info=info)

    # --- the boundary in memory ---------------------------------------------------------------------------------------

    def _donate(self, board: Board, host: Host, generation: int) -> None:
        """Put this rank's state into shared memory, and say so."""
        path = host.donate()
        word = board.write(f"{generation}/state", {"path": str(path)})
        if "path" not in word:
            raise self._refused(word, "it has been given up")

    def _get_state(self, board: Board, host: Host | None, generation: int) -> Path:
        """Wait until the boundary is in shared memory."""
        state = f"{generation}/state"
        note = self._wait(board, [state], host)[state]
        if "path" not in note:
            raise self._refused(note, "the donor's state is not there")
        return Path(str(note["path"]))

    # --- what is agreed on --------------------------------------------------------------------------------------------

    def _verdict(self, board: Board, host: Host | None, generation: int) -> RecoveryVerdict:
        keys = {rank: f"{generation}/out/{rank}" for rank in range(self.ranks.world_size)}
        notes = self._wait(board, list(keys.values()), host)
        for note in notes.values():
            if note.get("refusal"):  # the coordinator has given up before this rank has written its report
                raise self._refused(note, "")
        try:
            reports = {
                rank: None if notes[key].get("dead") else Report.from_json(rank, notes[key])
                for rank, key in keys.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RejoinFailed(f"a rank's report makes no sense ({printable(str(error), 200)})") from None
        self._orders = next((dict(report.orders) for report in reports.values() if report is not None), {})
        verdict = decide(reports, world_size=self.ranks.world_size)
        if verdict.refusal:
            raise RejoinFailed(verdict.refusal)
        return verdict

    def _refused(self, note: Mapping[str, Any], otherwise: str) -> RejoinFailed:
        return RejoinFailed(str(note.get("refusal", otherwise))[:_LONGEST])

    def _wait(self, board: Board, keys: list[str], host: Host | None) -> dict[str, dict[str, Any]]:
        end = time.monotonic() + self._timeout_s
        while host is None or not host.is_stopping():  # also where all is there already
            if (left := end - time.monotonic()) <= 0:
                raise RejoinFailed(f"the others have not come within {self._timeout_s:g} s (--rejoin-timeout)")
            found = board.wait(keys, min(left, _WAIT_S))
            if found is not None:
                return found
        raise RejoinFailed("the job is being stopped")

    # --- a new process ------------------------------------------------------------------------------------------------

    def others_are_out(self) -> bool:
        """Whether all ranks have reported already, so that they wait for this new process. Raises what a lost store
        raises."""
        return self._board(self.generation).has(f"{self.generation}/out/{r}" for r in range(self.ranks.world_size))

    def join(self, ddp: DdpModules, end_setup: Callable[[], None]) -> GuardEntry:
        """Training thread of a new process, before it enters its guard. `end_setup`: makes groups real ones again, see
        `joiner`. Raises RejoinFailed and UnfitSpareError."""
        generation = self.generation
        board = self._board(generation)
        verdict = self._verdict(board, None, generation)
        if self.ranks.rank not in verdict.dead:
            raise RejoinFailed(f"rank {self.ranks.rank} is alive")
        for name, module in ddp:
            order = list(self._orders.get(name, []))
            if name not in self.laid_out and (said := groups.rebuild_buckets(name, module, order)):
                raise RejoinFailed(said)
            if self.laid_out.get(name, order) != order:
                raise UnfitSpareError(f"the gradients of {name} arrive in another order than when it was forked")
        end_setup()
        groups.connect(self._gloo_store(generation), self.ranks.rank, self._timeout_s)

        def where() -> Path:
            try:
                return self._get_state(board, None, generation)
            except RejoinFailed as error:
                self.refuse(generation, str(error))
                raise

        return GuardEntry(generation=generation, verdict=verdict, where=where, live=None)

    def entered(self) -> None:
        """Training thread: the guard is open again. Tells the coordinator."""
        heard = {} if self._heard_at is None else {"heard": self._heard_at}
        self._board(self.generation).write(f"{self.generation}/ready/{self.ranks.rank}", heard)

    # --- the store ----------------------------------------------------------------------------------------------------

    def _board(self, generation: int) -> Board:
        return Board(self._connection(), key=board_key(), scope=f"{self._attempt}/{generation}", writer=self.ranks.rank)

    def _gloo_store(self, generation: int) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore(f"{generation}", self._connection())

    def _connection(self) -> Any:
        """A separate connection for all that a recovery writes and reads; torch's is used by others."""
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.PrefixStore(f"mindx/rejoin/{self._attempt}", open_connection())
        return self._store


_members: list[Member] = []
_told: set[str] = set()


def find_member(ranks: RankInfo, modules: Sequence[nn.Module], *, is_first_guard: bool) -> Member | None:
    """This process's member; None: a death restarts the job. `modules`: what the guard keeps of these. Raises
    MismatchError in a new process that cannot take its place."""
    settings, agent = RejoinSettings.from_env(), AgentInfo.from_env()
    if not settings.in_place or agent is None or ranks.world_size == 1:
        return None
    # A new process could not pass the guards before it.
    reason = groups.problem() if is_first_guard else "this is not the process's first guard"
    if any(isinstance(parameter, DTensor) for module in modules for parameter in module.parameters()):
        reason = reason or PARTS_DIFFER
    parts = (part for module in modules for part in module.modules())
    if any(part._comm_hooks for part in parts if isinstance(part, DistributedDataParallel)):
        reason = reason or _HAS_HOOK
    if reason:
        if settings.generation and is_first_guard:
            raise MismatchError(f"this process cannot take a dead rank's place: {reason}")
        tell_once(ranks, f"{reason}: when a rank dies, the whole job is restarted")
        return None
    if not _members:
        _members.append(Member(settings, ranks, agent))
    return _members[0]


def tell_once(ranks: RankInfo, text: str) -> None:
    """One line a job: why there is no recovery in place."""
    if ranks.rank == 0 and text not in _told:
        _told.add(text)
        logger.warning("--recover in-place: %s", text)


def join_job(member: Member, ddp: groups.DdpModules) -> GuardEntry:
    """In a new process: wait for the other ranks, and connect. Raises MismatchError."""
    try:
        return member.join(ddp, joiner.end_setup)
    except UnfitSpareError as error:
        spare.end_unfit(str(error))
    except RejoinFailed as error:
        member.refuse(member.generation, str(error))
        raise MismatchError(f"this process cannot take a dead rank's place: {error}") from None
