"""The nodes of a job: how they meet, who is there, what their agents tell each other.

`OneNodeRendezvous`, `FreshStoreRendezvous`
    take the place of torch's own rendezvous for a job of one node, and of its static one.
`watch_meetings`, `MeetingStore`
    miss a node that dies, or loses its connection, while the nodes meet.
`reconnect`, `require_host`
    open a rendezvous' connection to its store again after it broke; say that its host is lost.
`Membership`
    asks again and again, in a thread, which nodes want to join and which are lost.

torch's client of a TCP store never connects again: one reset of the connection, and every later call fails, the
heartbeats included, so that the other nodes take this one for lost and its agent cannot meet them at the next restart.
The store itself lives on, on its host. So a job of one node uses no connection at all: a firewall that is reloaded, a
network namespace that is rebuilt or `ss -K` would break it. For the others `reconnect` puts a new client of the same
host and port in the place of the broken one, which is kept: where it also hosts the store, that would end with it.

Rejected: a new handler in place of a new connection (the rendezvous would take it for another node, and would have to
miss the old one first).
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from mindx_elastic.agreement.hosting import host_store
from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.core.wakeup import Wakeup

__all__ = [
    "CONNECTION_ERRORS",
    "FreshStoreRendezvous",
    "HostLostError",
    "MeetingStore",
    "Membership",
    "OneNodeRendezvous",
    "after_meeting",
    "agree_on_highest",
    "identify",
    "open_again",
    "reconnect",
    "require_host",
    "say_goodbye",
    "watch_meetings",
]


class OneNodeRendezvous(RendezvousHandler):
    """For a job of one node: needs no other process and no connection.

    Each round is a store in this process's memory, and a free port for the store that rank 0 hosts. With `hosts` this
    process hosts that one, too, so that it outlives every worker.
    """

    def __init__(self, run_id: str, local_addr: str | None, *, hosts: bool = False) -> None:
        """local_addr: what the workers connect to; None: this machine's name, as with torch's own."""
        self._run_id, self._local_addr, self._hosts = run_id, local_addr, hosts
        self._rounds, self._closed = 0, False
        self._store = HashStore()
        self.hosted: TCPStore | None = None
        """The workers' store of this round, where this process hosts it."""

    def next_rendezvous(self) -> RendezvousInfo:
        self._rounds += 1
        store = PrefixStore(f"{self._run_id}/{self._rounds}", self._store)
        if self._hosts:
            address = self._local_addr or socket.getfqdn()
            # One for each round: a new attempt must not find the addresses of the old one's ranks.
            self.hosted = host_store(address)
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(address, self.hosted.port))
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, self._local_addr))

    @property
    def use_agent_store(self) -> bool:
        return self._hosts

    def get_backend(self) -> str:
        return "c10d"

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


class FreshStoreRendezvous(RendezvousHandler):
    """Wraps the handler of the static backend; each restart meets in a fresh store.

    Workers that meet again in the agent's store find the addresses of their dead predecessors there, and gloo fails
    ("Connection refused"). For the dynamic backends torch has a switch against it
    (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``); the static one always hands out the agent's store. The first attempt uses
    that one, as under torchrun, so that MASTER_PORT is the port that the user gave; each later one its own store,
    which rank 0 hosts on a free port.
    """

    def __init__(self, static: RendezvousHandler) -> None:
        self.inner = static
        """torch's own handler."""
        self._rounds = 0

    def next_rendezvous(self) -> RendezvousInfo:
        info = self.inner.next_rendezvous()
        self._rounds += 1
        if self._rounds == 1:
            return info
        address = None if info.bootstrap_store_info is None else info.bootstrap_store_info.master_addr
        store = PrefixStore(f"mindx-elastic/{self._rounds}", info.store)
        master = RendezvousStoreInfo.build(info.rank, store, address)
        return RendezvousInfo(store, info.rank, info.world_size, master)

    @property
    def use_agent_store(self) -> bool:
        return self._rounds <= 1

    def get_backend(self) -> str:
        return self.inner.get_backend()

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self.inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        return self.inner.shutdown()


_ANSWER_S = 5.0


def identify(handler: RendezvousHandler) -> str:
    """A name of the job that no other one has, as long as its rendezvous has the same store, which gets one if it has
    none; empty: it is not known. Blocks for some seconds at most."""
    store: Any = getattr(_inner(handler), "_store", None)  # below its rounds, in the torch known here
    key, thread = f"mindx-elastic/{handler.get_run_id()}/store", ReadyThread("mindx-nodes")
    try:
        name = thread.call(lambda: store.compare_set(key, "", secrets.token_hex(8)), _ANSWER_S)
        return bytes(name).decode(errors="replace")
    except Exception as error:  # any of torch's
        logger.debug("the job has no name: %s", error)
        return ""
    finally:
        thread.close(0.0)


def say_goodbye(handler: RendezvousHandler) -> None:
    """Close the rendezvous for all nodes, unless others go on without this one. Raises what torch raises."""
    with suppress(Exception):  # any of torch's; then it finds out by itself
        inner: Any = _inner(handler)
        with inner._heartbeat_lock:
            inner._state_holder.sync()
        state = inner._state_holder.state
        if state.complete and state.participants and inner._this_node not in state.participants:
            return
    handler.shutdown()


CONNECTION_ERRORS = (RendezvousConnectionError, DistNetworkError)
_CONNECT_S = 5.0
_READ_TIMEOUT = timedelta(seconds=60)  # torch's own, where it does not say what it was
_broken: list[Store] = []
_lock = threading.Lock()


def reconnect(handler: RendezvousHandler) -> bool:
    """Give `handler` a new connection if its own is broken. False: the store's host is gone, or this kind of handler is
    not known.

    Uses torch's private attributes; where they are not as in the versions known here, it does nothing, and the failure
    is handled as one that cannot be mended. Any thread; blocks for some seconds. Never raises.
    """
    # The membership thread may be at it when the main thread wants to meet the others.
    if not _lock.acquire(timeout=2 * _CONNECT_S):
        return False
    try:
        return _reconnect(handler)
    finally:
        _lock.release()


def _inner(handler: RendezvousHandler) -> Any:
    """torch's own handler."""
    return handler.inner if isinstance(handler, FreshStoreRendezvous) else handler


def _tcp_store(inner: Any) -> TCPStore | None:
    """The connection of torch's handler; None: it has none of this kind."""
    store: Any = getattr(inner, "_store", None)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _reconnect(handler: RendezvousHandler) -> bool:
    inner = _inner(handler)
    old: Any = _tcp_store(inner)
    if old is None:
        return False
    try:
        # torch's client would try for the whole time and print a page about each try.
        socket.create_connection((old.host, old.port), _CONNECT_S).close()
        if _answers(old):
            return True
        new = TCPStore(
            old.host,
            old.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_S),
        )
        new.set_timeout(getattr(old, "timeout", _READ_TIMEOUT))
        if not _answers(new):
            return False
    except Exception as error:
        logger.debug("%s:%d cannot be reached: %s", old.host, old.port, error)
        return False
    backend = getattr(getattr(inner, "_state_holder", None), "_backend", None)
    if backend is not None and getattr(backend, "_store", None) is old:
        backend._store = new
    inner._store = new
    _broken.append(old)
    logger.warning("the connection to the rendezvous' store at %s:%d was broken; it is open again", old.host, old.port)
    return True


def open_again(handler: RendezvousHandler) -> Store | None:
    """The store of the meeting over a new connection, if its own is broken; None: as with `reconnect`, or the host has
    started again, with an empty store, and knows of no such meeting, as far as that can be told: never of a static
    rendezvous. Raises what the store raises."""
    if not reconnect(handler) or (state := _read_state(handler)) is None:
        return None
    inner = _inner(handler)
    store: Any = inner._get_store()
    # What torch knows of the nodes may be of before: `agree_on_highest` has left a key in the store itself.
    is_ours = inner._this_node in state.participants and store.check(["mindx/restarts/0"])
    return after_meeting(store) if is_ours else None


class HostLostError(RendezvousError):
    """The store of the rendezvous has ended with its host, or that does not answer any more: no nodes can meet."""


_HOST_AGAIN_S = (0.1, 1.0, 3.0)  # its platform may start it again at once


def require_host(handler: RendezvousHandler) -> None:
    """Before the nodes meet again: the store of their rendezvous answers, perhaps over another connection. Main thread.

    One that is gone is asked for again for a few seconds, one that stands still is not. Raises HostLostError: torch
    would ask for minutes, and print a page about each try. Of a static rendezvous the host may come later; one over
    another store is not looked at.
    """
    store = _tcp_store(_inner(handler))
    if store is None:
        return
    if getattr(handler, "_state_holder", None) is None:
        reconnect(handler)
        return
    thread = ReadyThread("mindx-reconnect")
    try:
        for pause_s in (*_HOST_AGAIN_S, 0.0):
            if thread.call(lambda: reconnect(handler), 2 * _CONNECT_S):
                return
            time.sleep(pause_s)
    except TimeoutError:
        logger.debug("%s:%d stands still", store.host, store.port)
    finally:
        thread.close(0.0)
    raise HostLostError(
        f"the rendezvous at {store.host}:{store.port} is gone with its host, so the nodes cannot meet: "
        "start the same command on all nodes, that one among them"
    )


def _answers(store: Store) -> bool:
    with suppress(Exception):
        store.check(["mindx/answers"])
        return True
    return False


_MEET_LOOK_S = 0.05


class MeetingStore:
    """The store of one meeting: a read waits for its keys only while all the nodes are there. Any thread.

    A node may have died since it joined, or have lost its connection and want to meet again. Torch's agents would wait
    for its part for a minute, each from a moment of its own, and then miss each other in the next meeting. Reads raise
    DistStoreError when a node gives no sign of life any more, when the others meet again already, so that all meet at
    once, or after the store's own time; and what the store raises. All the rest is the store's.
    """

    def __init__(self, handler: RendezvousHandler, store: Any) -> None:
        """handler: torch's dynamic one, when the nodes have just met."""
        self._handler, self.store = handler, store
        state: Any = vars(handler)["_state_holder"].state
        # Their ranks are without a gap, unless one has left since.
        self._meeting, self._nodes = state.round, frozenset(range(len(state.participants)))

    def get(self, key: str) -> bytes:
        """The value of `key`."""
        self._await([key])
        return bytes(self.store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of `keys`."""
        self._await(keys)
        return list(self.store.multi_get(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def _await(self, keys: list[str]) -> None:
        until = time.monotonic() + getattr(self.store, "timeout", _READ_TIMEOUT).total_seconds()
        while not self.store.check(keys):
            if time.monotonic() > until:
                raise DistStoreError(f"{keys[0]} is not there since the nodes have met")
            time.sleep(_MEET_LOOK_S)
            if (state := _read_state(self._handler)) is None:
                continue
            missing = sorted(self._nodes.difference(state.participants.values()))
            if state.round != self._meeting or missing:
                which = f"node {missing[0]} gives no sign of life" if missing else "the others meet again"
                raise DistStoreError(f"{which} since the nodes have met")


def after_meeting(store: Any) -> Any:
    """The same store for all that follows, whose reads ask for no sign of life: one message each."""
    return store.store if isinstance(store, MeetingStore) else store


def watch_meetings(handler: RendezvousHandler) -> None:
    """From now on the store of each meeting of torch's dynamic `handler` is a `MeetingStore`; leaves others alone."""
    dynamic: Any = handler
    if getattr(handler, "_state_holder", None) is None or not hasattr(handler, "_get_store"):
        return
    of_torch, this = type(dynamic)._get_store, weakref.ref(dynamic)  # a handler ends with its last user, as torch's

    def open_store() -> MeetingStore:
        living: Any = this()
        return MeetingStore(living, of_torch(living))

    dynamic._get_store = open_store


def agree_on_highest(group: WorkerGroup, what: str, own: int, most: int) -> int:
    """The highest of the counts that the nodes of a meeting say under the name `what`; none of them is above `most`.
    Each node calls it; raises what the store raises."""
    store: Any = group.store
    node, num_nodes = int(group.group_rank or 0), int(group.group_world_size or 1)
    store.set(f"mindx/{what}/{node}", str(own))
    if node == 0:
        told = store.multi_get([f"mindx/{what}/{each}" for each in range(num_nodes)])
        store.set(f"mindx/{what}", str(max(_count(each, own, most) for each in told)))
    return _count(store.get(f"mindx/{what}"), own, most)


def _count(told: bytes, own: int, most: int) -> int:
    """What a node says; our own count where it says something else."""
    if len(told) <= 9 and told.isdigit() and int(told) <= most:
        return int(told)
    logger.warning("the store of the rendezvous holds no count, but %s; this node's counts", told[:60])
    return own


def _read_state(handler: RendezvousHandler) -> Any:
    """Of torch's dynamic rendezvous; without the nodes that have no heartbeat any more. None: it is of another kind."""
    if (holder := getattr(handler, "_state_holder", None)) is None:
        return None
    handler.num_nodes_waiting()
    state = getattr(holder, "state", None)
    return state if isinstance(getattr(state, "participants", None), Mapping) and hasattr(state, "round") else None


_QUESTION_S = 5.0
_CACHED_S = 1.0
"""As long torch's dynamic rendezvous answers from what it has read (`_BackendRendezvousStateHolder`)."""
_RETRY_S = 4.0  # a store that is gone seldom comes back, and torch prints a page about each try


class Membership:
    """Asks the rendezvous which nodes want to join and which are lost. One per attempt.

    In a separate thread, because each question is a round trip to a store on another machine, which may be gone; the
    main thread must hear of a worker's death meanwhile. `DynamicRendezvousHandler` allows it: it holds a lock against
    its own heartbeat thread while it answers. `start` and `stop` in the main thread, between two rendezvous; the rest
    in any thread.
    """

    def __init__(self, handler: RendezvousHandler, *, num_nodes: int, interval_s: float) -> None:
        """num_nodes: how many take part in this attempt."""
        self._handler, self._num_nodes, self._interval_s = handler, num_nodes, interval_s
        self.num_waiting = 0
        """Nodes that wait to be let in; all nodes must meet again."""
        self.lost = ""
        """Why a node is taken for lost, in words; empty while all are there."""
        self.missing: frozenset[int] = frozenset()
        """The nodes that are not in the rendezvous any more: lost, or about to meet the others again."""
        self.wakeup = Wakeup()
        self._stopping = threading.Event()
        self._wanted = threading.Event()
        self._asked = threading.Condition()
        self._asked_at = 0.0
        """When the newest question began that has an answer."""
        self._thread = threading.Thread(target=self._run, name="mindx-membership", daemon=True)

    def start(self) -> Membership:
        self._thread.start()
        return self

    def stop(self) -> None:
        """The thread may be stuck in a question to a dead machine; it is abandoned then, and does no harm."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join(_QUESTION_S)
        if not self._thread.is_alive():
            self.wakeup.close()

    def ask(self) -> int:
        """How many nodes wait at this very moment; what was known before if no answer comes in time. Takes a second
        where none waits: torch answers from a copy of the state that may be as old."""
        began = time.monotonic()

        def is_known() -> bool:
            return bool(self.num_waiting or self.lost) or self._asked_at >= began + _CACHED_S

        with self._asked:
            while not is_known() and time.monotonic() <= began + _QUESTION_S:
                self._wanted.set()
                self._asked.wait_for(is_known, _CACHED_S / 10)
        return self.num_waiting

    def missing_besides(self, own: int) -> dict[int, str]:
        """The other nodes that are `missing`, and the words for it."""
        return {node: f"node {node} gives no sign of life" for node in self.missing - {own}}

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wanted.clear()
            began = time.monotonic()
            waiting, lost = self._question()
            if (waiting > 0) != (self.num_waiting > 0) or bool(lost) != bool(self.lost):
                self.wakeup.ring()
            self.num_waiting, self.lost = waiting, lost
            with self._asked:
                self._asked_at = began
                self._asked.notify_all()
            if lost:
                self._stopping.wait(_RETRY_S)
            else:
                self._wanted.wait(self._interval_s)

    def _question(self) -> tuple[int, str]:
        try:
            waiting = self._handler.num_nodes_waiting()
        except Exception as error:  # any backend, any of its errors: the store does not answer
            logger.debug("the rendezvous does not answer: %s: %s", type(error).__name__, error)
            if not isinstance(error, CONNECTION_ERRORS) or self._stopping.is_set() or not reconnect(self._handler):
                return 0, f"the rendezvous does not answer ({type(error).__name__})"
            waiting = self.num_waiting  # where the new connection breaks, too: the next question is soon
            with suppress(Exception):
                waiting = self._handler.num_nodes_waiting()
        # Reading the state takes out nodes without a heartbeat. Not in torch's public interface.
        state = getattr(getattr(self._handler, "_state_holder", None), "state", None)
        participants = getattr(state, "participants", {})
        there = set(participants.values()) if isinstance(participants, Mapping) else set()
        self.missing = frozenset(range(self._num_nodes)) - there if there else frozenset()
        present = len(participants) or self._num_nodes
        if present >= getattr(getattr(self._handler, "settings", None), "max_nodes", math.inf):
            waiting = 0  # there is no room: a standby node waits until one is lost
        if present < self._num_nodes and not waiting:
            return 0, f"only {present} of {self._num_nodes} nodes give a sign of life"
        return waiting, ""
