"""Asks the rendezvous, again and again, who is there: nodes that want to join, nodes that are lost.

In a thread of its own, because each question is a round trip to a store on another machine, which may be gone; the main
thread must hear of a worker's death meanwhile. `DynamicRendezvousHandler` allows it: it holds a lock against its own
heartbeat thread while it answers.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from torch.distributed.elastic.rendezvous import RendezvousHandler

from mindx_elastic.agent.reconnect import CONNECTION_ERRORS, reconnect
from mindx_elastic.core.events import logger

__all__ = ["Membership"]

_ANSWER_S = 5.0
_RETRY_S = 4.0  # a store that is gone seldom comes back, and torch prints a page about each try


class Membership:
    """One per attempt. `start` and `stop` in the main thread, between two rendezvous; the rest in any thread."""

    def __init__(self, handler: RendezvousHandler, *, num_nodes: int, interval_s: float) -> None:
        """num_nodes: how many take part in this attempt."""
        self._handler, self._num_nodes, self._interval_s = handler, num_nodes, interval_s
        self.num_waiting = 0
        """Nodes that wait to be let in; everybody must meet anew."""
        self.lost = ""
        """Why a node is taken for lost, in words; empty while all are there."""
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()
        self._wanted = threading.Event()
        self._asked = threading.Condition()
        self._num_asked = 0
        self._thread = threading.Thread(target=self._run, name="mindx-membership", daemon=True)

    def start(self) -> Membership:
        self._thread.start()
        return self

    def stop(self) -> None:
        """The thread may be stuck in a question to a dead machine; it is left behind then, and does no harm."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join(_ANSWER_S)
        if not self._thread.is_alive():
            os.close(self.fd)
            os.close(self._writer)

    def ask(self) -> int:
        """How many nodes wait at this very moment; what was known before if no answer comes in time."""
        with self._asked:
            before = self._num_asked
            self._wanted.set()
            # Two: the first answer may be to a question that was under way already.
            self._asked.wait_for(lambda: self._num_asked >= before + 2 or bool(self.lost), _ANSWER_S)
        return self.num_waiting

    def _run(self) -> None:
        while not self._stopping.is_set():
            waiting, lost = self._question()
            if (waiting > 0) != (self.num_waiting > 0) or bool(lost) != bool(self.lost):
                with suppress(OSError):  # full: the main thread will wake up anyway
                    os.write(self._writer, b"!")
            self.num_waiting, self.lost = waiting, lost
            with self._asked:
                self._num_asked += 1
                again = self._wanted.is_set()
                self._wanted.clear()
                self._asked.notify_all()
            if lost:
                self._stopping.wait(_RETRY_S)
            elif not again:
                self._wanted.wait(self._interval_s)

    def _question(self) -> tuple[int, str]:
        try:
            waiting = self._handler.num_nodes_waiting()
        except Exception as error:  # any backend, any of its errors: the store does not answer
            logger.debug("the rendezvous does not answer: %s: %s", type(error).__name__, error)
            if isinstance(error, CONNECTION_ERRORS) and not self._stopping.is_set() and reconnect(self._handler):
                return self._num_waiting_again(), ""
            return 0, f"the rendezvous does not answer ({type(error).__name__})"
        # Nodes whose heartbeats have stopped are taken out by whoever reads the state. Not in torch's public interface.
        state = getattr(getattr(self._handler, "_state_holder", None), "state", None)
        present = len(getattr(state, "participants", ())) or self._num_nodes
        if present < self._num_nodes and not waiting:
            return 0, f"only {present} of {self._num_nodes} nodes give a sign of life"
        return waiting, ""

    def _num_waiting_again(self) -> int:
        """Over the new connection; what was known before where it breaks, too: the next question is soon."""
        with suppress(Exception):
            return self._handler.num_nodes_waiting()
        return self.num_waiting
