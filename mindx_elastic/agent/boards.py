"""The board of a recovery (`rejoin.board`) where it is in a store on another machine, which may be gone.

Each question to it is asked in a thread, and waits for a few seconds at most; while one has no answer, no other one is
asked (`Boards.ask`). `PlanWatch` looks for the next plan in a thread of its own.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore

from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import Job, ReadyThread
from mindx_elastic.core.wakeup import Wakeup
from mindx_elastic.rejoin.board import Board, board_key

__all__ = ["Boards", "BoundedBoard", "PlanWatch", "connect"]

_ANSWER_S = 5.0
_AGAIN_S = 1.0
_LOOK_S, _LOOK_S_PER_NODE = 0.02, 0.001
_T = TypeVar("_T")


def connect(address: str, port: int, scope: str) -> PrefixStore:
    """A connection to the workers' store, for the board of the attempt `scope`. Raises what torch raises, OSError."""
    # Torch's client would try for minutes, and print a page about each try.
    socket.create_connection((address, port), _ANSWER_S).close()
    own = TCPStore(address, port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"mindx/rejoin/{scope}", own)


class Boards:
    """The boards of an attempt's generations, over one connection. Main thread."""

    def __init__(self, connection: Callable[[], Any], scope: str, writer: int) -> None:
        self._connection, self._scope, self._writer = connection, scope, writer
        self._thread, self._store = ReadyThread("mindx-board"), functools.cache(connection)
        self._question: Job[Any] | None = None
        """The last one."""

    def __call__(self, generation: int) -> BoundedBoard:
        """The board of `generation`. Raises UsageError for a job key that cannot be used."""
        key, scope = board_key(), f"{self._scope}/{generation}"
        return BoundedBoard(self, lambda: Board(self._store(), key=key, scope=scope, writer=self._writer))

    def ask(self, work: Callable[[], _T]) -> _T:
        """Do `work` with the store in the thread. Raises TimeoutError where it takes too long, and at once where the
        question before it, to whichever board, has no answer yet."""
        if self._question is not None and not self._question.done.is_set():
            raise TimeoutError("the store of the job does not answer")
        self._question = question = self._thread.submit(work)
        try:
            return question.wait(_ANSWER_S)
        except TimeoutError:
            raise TimeoutError(f"the store of the job has not answered in {_ANSWER_S:g} s") from None

    def open(self) -> None:
        """Connect now, without waiting for it. A connection that fails is opened again when it is needed."""
        with suppress(RuntimeError):  # no more threads
            self._thread.submit(self._store)

    def close(self) -> None:
        """End the thread; left behind where it waits for a store that does not answer."""
        self._thread.close(0.1)


class BoundedBoard:
    """A board whose questions wait for an answer for a few seconds at most (`Boards.ask`)."""

    def __init__(self, boards: Boards, board: Callable[[], Board]) -> None:
        """`board` is called in the thread, as all that it is asked."""
        self._boards, self._board = boards, functools.cache(board)

    def write(self, key: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """As `Board.write`."""
        return self._boards.ask(lambda: self._board().write(key, content))

    def read(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """As `Board.read`."""
        return self._boards.ask(lambda: self._board().read(keys))


class PlanWatch:
    """Looks for the plan of the next recovery, which the agent of another node may write. One per attempt."""

    def __init__(self, connection: Callable[[], Any], num_nodes: int) -> None:
        """`connection`: makes a connection of its own; called in the thread."""
        self._connection, self._pause_s = connection, _LOOK_S + _LOOK_S_PER_NODE * num_nodes
        self.newest = 0
        """The last generation of which there is a plan."""
        self.wakeup = Wakeup()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mindx-plans", daemon=True)

    def start(self) -> PlanWatch:
        self._thread.start()
        return self

    def stop(self) -> None:
        """The thread may be stuck in a question to a dead machine; it is left behind then, and does no harm."""
        self._stopping.set()
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self.wakeup.close()

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
                self.wakeup.ring()
