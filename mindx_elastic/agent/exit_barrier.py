"""How the nodes of an attempt end together: in place of torch's exit barrier, which waits five minutes for a lost node.

An agent whose workers have ended says how in the store of the attempt's rendezvous (`NodeEnd`). One whose ranks have
finished then waits for the others (`wait_for_all`), until each has said so, too, or is lost. A node that sees a loss
says it for the lost node. Each node's entry is written once, by compare-and-set, so all come to the same:

* all have finished: the job has;
* one meets the others again, because a rank of it has failed, or is lost with what its ranks had still to save: all
  meet again. If the last boundary is on disk, that attempt trains nothing, and runs what follows the training;
* one was stopped: so is the job.

In the end each says that it has seen that, and waits a moment for the others' word: the store ends with its host.

Before that, agents tell each other which ranks one of them has had to end after the training (`ExitBarrier.tell`). The
ranks of other nodes may have waited for such a rank in a collective, and now fail without a fault.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.inbox import SignalInbox
from mindx_elastic.alarm.alarm import signal_name
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY, exit_code_of_signal
from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import Words, read
from mindx_elastic.core.ready_thread import ReadyThread

__all__ = ["FINISHED", "LOST", "ExitBarrier", "NodeEnd", "end_together", "wait_for_all"]

FINISHED, LOST = "finished", "lost"
"""Outcomes of a node that matter here; the others are those of an attempt (`endings.Ending`)."""
_T = TypeVar("_T")
_ENDED_RANKS, _END, _SEEN = "mindx/ended_after_training", "mindx/end", "mindx/seen"
_ANSWER_S = 3.0
_SEEN_S = 30.0
_HURRY_S = 5.0
"""As long an agent that is told to stop waits for the others: it may host the store, and they are about to end, too."""
_LOOK_S, _LOOK_S_PER_NODE = 0.1, 0.002
_LOST_S = 12.0
_MAX_CHARS = 1 << 16


@dataclass(frozen=True)
class NodeEnd:
    """How a node's part of an attempt has ended."""

    outcome: Annotated[str, Words(40)]
    cause: Annotated[str, Words(500)] = ""
    """For a person."""


class ExitBarrier:
    """The store's side, for one node. One per attempt with several nodes. Main thread; each call blocks for a few
    seconds at most, and raises nothing: where the store does not answer, nothing is heard."""

    def __init__(self, store: Any, *, node: int, num_nodes: int, world_size: int) -> None:
        """`store`: torch's, the same for all nodes of this attempt and for no other attempt."""
        self._store, self.node, self.num_nodes, self._world_size = store, node, num_nodes, world_size
        self._keys = [f"{_END}/{each}" for each in range(num_nodes)]
        self._thread, self._opener = ReadyThread("mindx-exit-barrier"), ReadyThread("mindx-exit-barrier")
        self.is_lost = False
        """The store does not answer."""

    def reopen(self, new_store: Callable[[], Any | None]) -> bool:
        """Use what `new_store` returns, if it comes to that in a few seconds. It may never return."""
        if self._opener.busy:
            return False
        try:
            store = self._opener.call(new_store, _ANSWER_S)
        except Exception as error:  # any of torch's
            logger.debug("the store of the rendezvous cannot be reached: %s: %s", type(error).__name__, error)
            return False
        if store is not None:
            self._store, self.is_lost = store, False
            self._thread.close(0.0)  # it may be stuck
            self._thread = ReadyThread("mindx-exit-barrier")
        return store is not None

    def close(self) -> None:
        """No call may follow."""
        self._thread.close(0.0)
        self._opener.close(0.0)

    def tell(self, ranks: Sequence[int]) -> None:
        """These ranks are about to be ended. Call it before the first signal, so that ranks that fail can learn why."""
        self._ask(lambda: self._store.set(_ENDED_RANKS, json.dumps(list(ranks))), None)

    def heard(self) -> list[int]:
        """The ranks that some node has ended; empty: none, or the store does not answer. A caller that is told nothing
        takes a failure for a failure."""
        text = self._ask(lambda: self._store.get(_ENDED_RANKS) if self._store.check([_ENDED_RANKS]) else b"", b"")
        try:
            ranks = json.loads(text[:_MAX_CHARS]) if text else []
        except (ValueError, RecursionError):
            return []
        known = isinstance(ranks, list) and all(type(r) is int and 0 <= r < self._world_size for r in ranks)
        return ranks if known else []

    def say(self, end: NodeEnd, node: int | None = None) -> None:
        """How this node has ended, or another one. What was said of it before counts."""
        key, value = self._keys[self.node if node is None else node], json.dumps(asdict(end))
        self._ask(lambda: self._store.compare_set(key, "", value), None)

    def has_all(self) -> bool:
        """Whether it is known of every node how it has ended."""
        return self._ask(lambda: bool(self._store.check([*self._keys])), False)

    def ends(self) -> dict[int, NodeEnd]:
        """How the nodes have ended, as far as that is known."""
        found: dict[int, NodeEnd] = {}
        nothing: list[bytes] = []

        def said() -> list[bytes]:
            if self._store.check([*self._keys]):  # as a rule: two messages, however many nodes there are
                return list(self._store.multi_get(self._keys))
            return [self._store.get(key) if self._store.check([key]) else b"" for key in self._keys]

        for node, text in enumerate(self._ask(said, nothing)):
            try:
                found |= {node: read(NodeEnd, json.loads(text[:_MAX_CHARS]))} if text else {}
            except (ValueError, RecursionError):
                found[node] = NodeEnd("failed", "what the store of the rendezvous says of it makes no sense")
        return found

    def leave(self, nodes: Sequence[int], is_hurried: Callable[[], bool] = lambda: False) -> None:
        """This node has seen how all have ended. Waits for the same word of these nodes, half a minute at most: one of
        their agents, or this one, may host the store. `is_hurried`: see `wait_for_all`."""
        keys, began = [f"{_SEEN}/{node}" for node in nodes], time.monotonic()
        self._ask(lambda: self._store.set(f"{_SEEN}/{self.node}", "1"), None)
        while not self.is_lost and not self._ask(lambda: self._store.check(keys), True):
            if time.monotonic() > began + (_HURRY_S if is_hurried() else _SEEN_S):
                return
            time.sleep(_LOOK_S / 2)

    def _ask(self, work: Callable[[], _T], otherwise: _T) -> _T:
        """The store's machine may be gone, and a call to it has no time-out."""
        if self.is_lost:
            return otherwise
        try:
            return self._thread.call(work, _ANSWER_S)
        except Exception as error:  # any of torch's
            logger.debug("the store of the rendezvous does not answer: %s: %s", type(error).__name__, error)
            self.is_lost = True
            return otherwise


def wait_for_all(
    barrier: ExitBarrier,
    lost: Callable[[], Mapping[int, str]],
    new_store: Callable[[], Any | None],
    timeout_s: float,
    is_hurried: Callable[[], bool] = lambda: False,
) -> dict[int, NodeEnd]:
    """This node's ranks have finished their training. How each node has ended, also this one.

    A node that lives and has not ended within `timeout_s` is not among them. One of which nothing can be known because
    the store is lost counts as lost. `lost`: the nodes that give no sign of life, and the words for it. `new_store`:
    the attempt's store over another connection; None: it is lost. It is called in a thread. `is_hurried`: this agent is
    told to stop, and waits for a moment only. Main thread.
    """
    own, missing = NodeEnd(FINISHED), dict[int, str]()
    barrier.say(own)
    until, gives_up = time.monotonic() + timeout_s, math.inf
    while not barrier.has_all() and time.monotonic() < min(until, gives_up):
        if is_hurried():
            until = min(until, time.monotonic() + _HURRY_S)
        for node, cause in lost().items():
            if missing.setdefault(node, cause) is cause:
                barrier.say(NodeEnd(LOST, cause), node)
        if barrier.is_lost and barrier.reopen(new_store):
            barrier.say(own)
            gives_up = math.inf
        elif barrier.is_lost:
            # Its host is gone, which is noticed in this time. Of the others nothing can be heard any more.
            gives_up = min(gives_up, time.monotonic() + (0.0 if missing else _LOST_S))
        time.sleep(_LOOK_S + _LOOK_S_PER_NODE * barrier.num_nodes)
    said = barrier.ends()
    if barrier.is_lost and barrier.reopen(new_store):
        said = barrier.ends()
    if barrier.is_lost:
        unknown = "of node {} nothing is known: the store of the rendezvous is gone"
        missing = {node: unknown.format(node) for node in range(barrier.num_nodes)} | missing
    return {node: NodeEnd(LOST, cause) for node, cause in missing.items()} | {barrier.node: own} | said


def end_together(
    own: Ending,
    barrier: ExitBarrier,
    lost: Callable[[], Mapping[int, str]],
    *,
    inbox: SignalInbox,
    new_store: Callable[[], Any | None],
    timeout_s: float,
) -> Ending:
    """How the attempt has ended for all nodes. Main thread; waits for the other nodes.

    own: how it has ended here. lost, new_store: see `wait_for_all`. A signal makes it short: see `_HURRY_S`.
    """

    def is_hurried() -> bool:
        return inbox.first is not None

    ends = wait_for_all(barrier, lost, new_store, timeout_s, is_hurried)
    others = sorted((end.outcome == "stopped", node, end) for node, end in ends.items() if end.outcome != FINISHED)
    signum = inbox.first
    if signum is not None and (others or len(ends) < barrier.num_nodes):
        return Ending(outcome="stopped", code=exit_code_of_signal(signum), cause=signal_name(signum))
    if not others:
        barrier.leave(list(ends), is_hurried)
        return own
    is_stop, node, end = others[0]
    outcome = "stopped" if is_stop else "failed" if end.outcome in ("failed", LOST) else "membership"
    cause = f"node {node} {'was stopped' if is_stop else 'has not ended'}: {end.cause}"
    return Ending(outcome=outcome, code=EXIT_TEMPORARY, cause=cause, elsewhere=True)
