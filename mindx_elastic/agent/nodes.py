"""Recoveries in place over several nodes, from an agent's side.

Every agent runs a `NodesRecovery` over the same board, and none of them is special: the one that sees a death first
writes the plan, the others read it, look whether their own ranks can take part, and tell those. Each starts the new
processes of its own ranks. What all of them must see alike is a note that the first writer settles: the plan, each
rank's report or death, the donor's word, and ``{g}/over``, that the recovery has succeeded or that it has not.

The board is in a store on another machine, which may be gone: each question to it is asked in a thread, and waits for a
few seconds at most (`BoundedBoard`). `PlanWatch` looks for the next plan in a thread of its own.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore

from mindx_elastic.agent.endings import Meaning, describe, meaning
from mindx_elastic.agent.recovery import ERRORS, Generation, Recovery
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.core.status_page import WorkerPhase
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.protocol import InMemory

__all__ = ["Boards", "BoundedBoard", "NodesRecovery", "PlanWatch", "connect"]

_ANSWER_S = 5.0
_AGAIN_S = 1.0
_LOOK_S, _LOOK_S_PER_NODE = 0.02, 0.001
_LONGEST = 300
_T = TypeVar("_T")


def connect(address: str, port: int, scope: str) -> PrefixStore:
    """A connection to the workers' store, for the board of the attempt `scope`. Raises what torch raises, OSError."""
    # Torch's client would try for minutes, and print a page about each try.
    socket.create_connection((address, port), _ANSWER_S).close()
    own = TCPStore(address, port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"mindx/rejoin/{scope}", own)


class BoundedBoard:
    """Asks a board in a thread. A call that gets no answer in time raises TimeoutError, and each later one does so at
    once. Main thread."""

    def __init__(self, thread: ReadyThread, board: Callable[[], Board]) -> None:
        """`board` is called in `thread`, as all that it is asked."""
        self._thread, self._board = thread, functools.cache(board)
        self._lost = False

    def write(self, key: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """As `Board.write`."""
        return self._ask(lambda: self._board().write(key, content))

    def read(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """As `Board.read`."""
        return self._ask(lambda: self._board().read(keys))

    def _ask(self, work: Callable[[], _T]) -> _T:
        if self._lost:
            raise TimeoutError("the store of the job does not answer")
        try:
            return self._thread.call(work, _ANSWER_S)
        except TimeoutError:
            self._lost = True
            raise TimeoutError(f"the store of the job has not answered in {_ANSWER_S:g} s") from None


class Boards:
    """The boards of an attempt's generations, over one connection."""

    def __init__(self, connection: Callable[[], Any], scope: str, writer: int) -> None:
        self._connection, self._scope, self._writer = connection, scope, writer
        self._thread, self._store = ReadyThread("mindx-board"), functools.cache(connection)

    def __call__(self, generation: int) -> BoundedBoard:
        """The board of `generation`. Raises UsageError for a job key that cannot be used."""
        key, scope = board_key(), f"{self._scope}/{generation}"
        return BoundedBoard(self._thread, lambda: Board(self._store(), key=key, scope=scope, writer=self._writer))

    def open(self) -> None:
        """Connect now, without waiting for it. A connection that fails is opened again when it is needed."""
        with suppress(RuntimeError):  # no more threads
            self._thread.submit(self._store)

    def close(self) -> None:
        """End the thread; left behind where it waits for a store that does not answer."""
        self._thread.close(0.1)


class PlanWatch:
    """Looks for the plan of the next recovery, which the agent of another node may write. One per attempt."""

    def __init__(self, connection: Callable[[], Any], num_nodes: int) -> None:
        """`connection`: makes a connection of its own; called in the thread."""
        self._connection, self._pause_s = connection, _LOOK_S + _LOOK_S_PER_NODE * num_nodes
        self.newest = 0
        """The last generation of which there is a plan."""
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mindx-plans", daemon=True)

    def start(self) -> PlanWatch:
        self._thread.start()
        return self

    def drain(self) -> None:
        """Main thread: `fd` was readable."""
        with suppress(BlockingIOError):
            os.read(self.fd, 512)

    def stop(self) -> None:
        """The thread may be stuck in a question to a dead machine; it is left behind then, and does no harm."""
        self._stopping.set()
        self._thread.join(1.0)
        if not self._thread.is_alive():
            os.close(self.fd)
            os.close(self._writer)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look(self._connection())
            except Exception as error:  # any of torch's: the connection is broken, or its host is gone
                logger.debug("the store of the workers does not answer: %s", error)
            self._stopping.wait(_AGAIN_S)

    def _look(self, store: Any) -> None:
        while not self._stopping.wait(self._pause_s):
            if store.check([f"{self.newest + 1}/plan"]):
                self.newest += 1
                with suppress(OSError):  # full: the main thread will wake up anyway
                    os.write(self._writer, b"!")


class NodesRecovery(Recovery):
    """One per attempt of several nodes. Main thread."""

    def __init__(self, *arguments: Any, watch: PlanWatch, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._watch = watch
        self._seen = 0  # the last generation whose plan was read, or written

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._watch.fd,)

    def prepare(self) -> None:
        if not self._is_prepared and isinstance(self._board_of, Boards):
            self._is_prepared = True
            self._board_of.open()

    def close(self) -> None:
        super().close()
        if self.is_active and not self.is_out:  # a stop: the others need not wait for this node
            self._call_off("a node has been stopped during the recovery")
        elif not self.is_out and {meaning(end) for end in self._workers.exits} == {Meaning.FINISHED}:
            ranks = rank_list(list(self._workers.processes))
            self._refuse(self._machine.generation + 1, f"{ranks} of another node have finished the training")
        self._watch.stop()
        if isinstance(self._board_of, Boards):
            self._board_of.close()

    def why_not(self, ranks: Sequence[int], end: WorkerExit | None = None) -> str:
        if end is None and ranks:
            return "which rank the others wait for cannot be told over several nodes"
        if end is not None and end.status is not None and end.status.phase >= WorkerPhase.STOPPING:
            return f"rank {end.rank} has left its guard: {describe(end)}"
        return super().why_not(ranks, end)

    def begin(self, end: WorkerExit, cause: str, *, stuck_s: float = 0.0) -> bool:
        generation = self._machine.generation + 1
        self._seen = max(self._seen, generation)
        begins = super().begin(end, cause, stuck_s=stuck_s)
        if not begins and not self.is_out:  # another agent may have planned one at this very moment, and would wait
            self._refuse(generation, f"rank {end.rank} cannot be replaced")
        return begins

    def _refuse(self, generation: int, reason: str) -> None:
        """The recovery with this number comes to nothing, whoever begins it."""
        with suppress(*ERRORS):
            self._board_of(generation).write(f"{generation}/over", {"refusal": reason})

    def hear_others(self, *, is_stopping: bool) -> int | None:
        self._watch.drain()
        generation = self._machine.generation + 1
        if self.is_active or not self._seen < generation <= self._watch.newest:
            return None
        self._seen = generation
        try:
            board = self._board_of(generation)
            plan = board.read([f"{generation}/plan"])[f"{generation}/plan"]
            if "refusal" in plan:
                logger.info("no recovery in place: %s", printable(str(plan["refusal"]), _LONGEST))
                return None
            rank, cause = int(plan["rank"]), printable(str(plan["cause"]), _LONGEST)
            if not 0 <= rank < self._machine.world_size:
                raise ValueError(f"a plan for rank {rank}")
            if rank in self._workers.processes:
                self._hear_own_loss(plan)
                return None
            reason = "the job is being stopped" if is_stopping else self.why_not([])
        except ERRORS as error:
            logger.warning("the plan of recovery %d cannot be used: %s: %s", generation, type(error).__name__, error)
            return None
        self._tell()
        is_node = "node" in plan  # its ranks are noted to be dead once another node has taken its place
        self._machine.begin([] if is_node else [rank])
        self._board = board
        now = time.time()
        self._now = Generation(now, now, cause, time.monotonic() + self._timeout_s)
        if is_node:
            self._hear_of_node(plan)
        if reason:
            self._call_off(reason)
            return None
        return rank

    def _hear_own_loss(self, plan: Mapping[str, Any]) -> None:
        """A plan of another agent's is for a rank of this node. Raises ValueError."""
        raise ValueError(f"a plan for rank {plan['rank']}, which is this node's")

    def _hear_of_node(self, plan: Mapping[str, Any]) -> None:
        """A plan is for all ranks of another node."""

    # --- what all agents see alike ------------------------------------------------------------------------------------

    def _plan(self, generation: int, end: WorkerExit, cause: str) -> dict[str, Any]:
        return {"generation": generation, "rank": end.rank, "cause": cause}

    def _hear_out(self, rank: int, note: Mapping[str, Any]) -> None:
        if "refusal" in note:  # another agent has given up
            self._machine.note_refusal(printable(str(note["refusal"]), _LONGEST))
        elif note.get("dead") and rank not in self._workers.processes:  # its own agent has seen it
            self._machine.note_death(rank, InMemory.from_json(note))
        else:
            super()._hear_out(rank, note)

    def _look_at_end(self) -> None:
        """Whether another agent has said how the recovery has ended."""
        assert self._board is not None
        over = f"{self._machine.generation}/over"
        note = self._board.read([over]).get(over, {})
        if "refusal" in note:
            self._machine.note_refusal(printable(str(note["refusal"]), _LONGEST))

    def _is_settled(self) -> bool:
        assert self._board is not None
        note = self._board.write(f"{self._machine.generation}/over", {"done": True})
        if "refusal" in note:
            self._machine.note_refusal(printable(str(note["refusal"]), _LONGEST))
        return "done" in note

    def _call_off(self, reason: str) -> None:
        assert self._board is not None
        try:
            note = self._board.write(f"{self._machine.generation}/over", {"refusal": reason})
        except ERRORS as error:
            logger.debug("the board cannot be written to: %s", error)
            note = {"refusal": reason}
        if "refusal" in note:
            self._machine.note_refusal(printable(str(note["refusal"]), _LONGEST))

    def _give_up(self) -> None:
        self._call_off(self._machine.reason)
        super()._give_up()
