"""The store of torch's rendezvous at its endpoint, after its host was lost.

With ``--rdzv-backend c10d`` one of the agents hosts that store, usually the one on the machine that the endpoint names,
and its death ends the store. The same command, started again on that machine or on another one that has the endpoint's
address then, hosts a new, empty store. The agents of the survivors wait for that (`Finder`), and one of them *adopts*
it: it puts the meeting in which they have got their numbers into torch's state of the rendezvous there, with the word
for which recovery (`rejoin.belonging`). torch writes that state by compare-and-set, so that either new nodes have begun
without the survivors, or these go on, and all agents see the same. Then each survivor goes over to the new store
(`move`), and all goes on as after the loss of any other node: who hosts the workers' store, and whose place is free, is
settled there.

Where the old host has only stood still, its store answers again. To torch that meeting is over then, for want of
heartbeats; whoever looked for the store puts it back (`come_in`), and all goes on in it.

What else a meeting has left in the old store, and who comes later needs, every agent keeps (`remember`): `Kept`.

Uses torch's private attributes; where they are not as in the versions known here, or where the store is none of
torch's TCP stores (etcd, a file), nobody waits, and the loss is handled as one that cannot be mended.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.rejoin.belonging import Adoption, Deed, Sight, deed

__all__ = [
    "AGREED",
    "Finder",
    "Found",
    "GoesOn",
    "Kept",
    "address_of",
    "come_in",
    "holder_of",
    "identify",
    "is_adopted",
    "is_store",
    "move",
    "remember",
]

_ID = "mindx-elastic/{}/store"
AGREED = ("restarts", "attempts")
"""The counts on which all nodes of a meeting agree; see `rendezvous.agree_on_highest`."""
_OF_NODE = ("torchelastic/role_info/{}", "torchelastic/assigned_ranks/{}", *(f"mindx/{what}/{{}}" for what in AGREED))
"""What torch, and `supervisor.Supervisor`, have told each other in the meeting; a new node asks for all of it."""
_MARK = "mindx_adopted"
"""Attribute of torch's state: scope, number of the recovery, round. torch hands on what it does not know."""
_CONNECT_S, _ANSWER_S = 2.0, 5.0
_LOOK_S = 0.05
_READ_TIMEOUT = timedelta(seconds=60)  # torch's own, where it does not say what it was
_PATIENCE_S = 10.0
_TRIES = 10
_old: list[Any] = []
"""What threads may still be stuck in, and stores that this process may host: they end with it."""


@dataclass(frozen=True)
class Kept:
    """What a meeting has left in the store of the rendezvous."""

    round: int = 0
    in_round: Mapping[str, bytes] = field(default_factory=dict)
    """What is under the prefix of the round."""
    in_root: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The store at the endpoint, and what it means."""

    deed: Deed
    store: Any = None
    holder: Any = None
    """torch's, of the state of the rendezvous there."""
    identity: str = ""


def _tcp_store(handler: Any) -> TCPStore | None:
    """The connection of torch's handler; None: it has none of this kind."""
    store = getattr(handler, "_store", None)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


_NEEDED = ("_state_holder", "_op_executor", "_heartbeat_lock", "_this_node", "_settings", "_keep_alive_timer")


def address_of(handler: Any) -> tuple[str, int] | None:
    """The endpoint of torch's handler; None: another host cannot take its store's place."""
    store = _tcp_store(handler)
    backend = getattr(getattr(handler, "_state_holder", None), "_backend", None)
    if store is None or backend is None or not all(hasattr(handler, name) for name in _NEEDED):
        return None
    return str(store.host), int(store.port)


def identify(store: Any, run_id: str) -> str:
    """The name of this very store, which no other one has; it gets one if it has none. Blocks; raises what torch
    raises."""
    return bytes(store.compare_set(_ID.format(run_id), "", secrets.token_hex(8))).decode(errors="replace")


def is_store(store: Any, run_id: str, identity: str) -> bool:
    """Whether this is the store with that name. Blocks; raises what torch raises."""
    key = _ID.format(run_id)
    return bool(store.check([key])) and bytes(store.get(key)).decode(errors="replace") == identity


def remember(handler: Any, store: Any, root_keys: Collection[str], num_nodes: int) -> Kept:
    """What the meeting has left there. `root_keys`: of the other agents, which may take a moment. Blocks; raises what
    torch raises."""
    until = time.monotonic() + _PATIENCE_S
    while not store.check(list(root_keys)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    in_round = [f"mindx/{what}" for what in AGREED]
    in_round += [key.format(node) for key in _OF_NODE for node in range(num_nodes)]
    return Kept(
        int(handler._state_holder.state.round),
        _there(handler._get_store(), in_round),
        _there(store, list(root_keys)),
    )


def _there(store: Any, keys: list[str]) -> dict[str, bytes]:
    known = keys if store.check(keys) else [key for key in keys if store.check([key])]
    return dict(zip(known, store.multi_get(known), strict=True)) if known else {}


def holder_of(handler: Any, store: Any, run_id: str) -> Any:
    """Of torch's state in `store`, as it is now; beside the handler's own, for any thread. Raises what torch raises."""
    old = handler._state_holder
    holder = type(old)(type(old._backend)(store, run_id), handler._settings)
    holder._cache_duration = 0
    holder.sync()
    return holder


@dataclass(frozen=True)
class GoesOn:
    """The meeting goes on in the store in which it was held, although torch may know none of its nodes any more."""

    scope: str
    generation: int
    """The recovery in which that is so."""
    kept: Kept | None


def come_in(handler: Any, holder: Any, node: int, goes_on: GoesOn | None = None) -> None:
    """This node, `node` by its number, is among those that torch knows in the state of `holder`. It may not be: who
    adopted a store may have taken it for lost.

    Where a store's host has stood still, and answers again, no heartbeat has come through meanwhile: to torch all nodes
    are dead, the rendezvous is over, and each node that comes begins another one, for which it waits in vain. With
    `goes_on` the meeting is put there again, with the mark by which those find themselves in front of it. Blocks;
    raises what torch raises.
    """
    own = handler._this_node
    for _ in range(_TRIES):
        state = holder.state
        if state.complete and (own in state.participants or node in state.participants.values()):
            return
        if not state.complete:
            if goes_on is None or goes_on.kept is None or state.closed:
                return
            state.participants, state.last_heartbeats = {}, {}
            state.wait_list, state.redundancy_list = set(), set()
            # The same round: what the nodes have told each other is under its number, and not all of them look again.
            state.round, state.complete, state.deadline = goes_on.kept.round, True, None
            setattr(state, _MARK, [goes_on.scope, goes_on.generation, state.round])
        state.participants[own], state.last_heartbeats[own] = node, datetime.now(timezone.utc)
        holder.mark_dirty()
        if holder.sync():
            return


class Finder:
    """Looks for a store that answers at the endpoint, in a thread, until it is known what to do with it. One for each
    recovery that needs it. `start` and `stop` once, in the main thread."""

    def __init__(
        self,
        handler: Any,
        *,
        run_id: str,
        identity: str,
        scope: str,
        generation: int,
        node: int,
        lost: Collection[int],
        kept: Callable[[], Kept | None],
        is_sure: Callable[[], bool],
    ) -> None:
        """`identity`: of the store that was used so far. `node`: this one's number. `lost`: the numbers of nodes that
        are lost for sure. `kept`: None: it is not known. `is_sure`: see `rejoin.belonging.deed`."""
        self._handler, self._run_id, self._identity, self._scope = handler, run_id, identity, scope
        self._generation, self._node, self._lost = generation, node, frozenset(lost)
        self._kept, self._is_sure = kept, is_sure
        self._address = address_of(handler)
        self.found: Found | None = None
        self._stopping = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="mindx-endpoint", daemon=True)

    def start(self) -> Finder:
        self._thread.start()
        return self

    def stop(self) -> None:
        """The thread may be stuck in a question to a dead machine; it is left behind then, and does no harm."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                found = self._look()
            except Exception as error:  # any of torch's
                self._say(f"{type(error).__name__}: {error}")
                found = None
            if found is not None:
                self.found = found
                return
            self._stopping.wait(_LOOK_S)

    def _say(self, text: str) -> None:
        text = printable(text, 200).partition("\n")[0]
        if text != self._said:
            self._said = text
            logger.debug("the endpoint of the rendezvous: %s", text)

    def _look(self) -> Found | None:
        """What to do; None: it is not known yet. Raises what torch raises."""
        if self._address is None:
            return Found(Deed.RESTART)
        with suppress(OSError):
            # torch's client would try for the whole time and print a page about each try.
            socket.create_connection(self._address, _CONNECT_S).close()
            return self._judge(self._connect(*self._address))
        return None

    def _connect(self, host: str, port: int) -> Store:
        timeout = timedelta(seconds=_ANSWER_S)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        store.check(["mindx/answers"])
        return store

    def _judge(self, store: Any) -> Found | None:
        is_same = is_store(store, self._run_id, self._identity)
        holder = holder_of(self._handler, store, self._run_id)
        what = deed(
            _sight(holder.state, is_same=is_same),
            scope=self._scope,
            generation=self._generation,
            is_sure=self._is_sure(),
        )
        if what is Deed.WAIT:
            return None
        if what is Deed.ADOPT:
            if self._stopping.is_set():
                return None
            what = self._adopt(holder)
        if what in (Deed.CLAIM, Deed.READ):
            if not is_same:
                self._fill(store, holder.state)
            goes_on = GoesOn(self._scope, self._generation, self._kept()) if is_same else None
            come_in(self._handler, holder, self._node, goes_on)
            store.set_timeout(getattr(_tcp_store(self._handler), "timeout", _READ_TIMEOUT))
            return Found(what, store, holder, identify(store, self._run_id))
        return None if what is Deed.ADOPT else Found(what)

    def _adopt(self, holder: Any) -> Deed:
        """Put this meeting's nodes into the state; `ADOPT` where another one was faster: look again."""
        kept, before = self._kept(), self._handler._state_holder.state
        if kept is None or not before.complete or not before.participants:
            return Deed.RESTART
        state, now = holder.state, datetime.now(timezone.utc)
        others = {node: number for node, number in before.participants.items() if number not in self._lost}
        state.participants = {**others, self._handler._this_node: self._node}
        state.last_heartbeats = dict.fromkeys(state.participants, now)
        state.wait_list, state.redundancy_list = set(), set()  # who waits there finds itself in front of it
        state.round = max(kept.round, state.round) + 1
        state.complete, state.closed, state.deadline = True, False, None
        setattr(state, _MARK, [self._scope, self._generation, state.round])
        holder.mark_dirty()
        return Deed.CLAIM if holder.sync() else Deed.ADOPT

    def _fill(self, store: Any, state: Any) -> None:
        """All survivors write the same."""
        kept = self._kept() or Kept()
        for key, value in kept.in_root.items():
            store.compare_set(key, "", value)
        in_round: Any = PrefixStore(f"torch.rendezvous.{self._run_id}.{state.round}", store)
        for key, value in kept.in_round.items():
            in_round.set(key, value)


def _sight(state: Any, *, is_same: bool) -> Sight:
    said = getattr(state, _MARK, None)
    adoption = None
    if state.complete and isinstance(said, list) and len(said) == 3 and said[2] == state.round:
        adoption = Adoption(str(said[0]), int(said[1]))
    has_begun = adoption is None and bool(state.complete or state.closed or state.round > 0)
    return Sight(is_same=is_same, adoption=adoption, has_begun=has_begun)


def is_adopted(state: Any) -> bool:
    """Whether survivors go on in a rendezvous with this state."""
    return _sight(state, is_same=False).adoption is not None


def move(handler: Any, found: Found) -> None:
    """torch's handler uses the store that was found from now on. Main thread; blocks for nothing, although threads may
    be stuck in questions to the old one."""
    timer = handler._keep_alive_timer
    _old.extend([handler._store, handler._state_holder, handler._op_executor, timer])
    with suppress(AttributeError):
        timer._ctx.stop_event.set()
    found.holder._cache_duration = getattr(handler._state_holder, "_cache_duration", 1)
    handler._heartbeat_lock = threading.Lock()
    handler._store, handler._state_holder = found.store, found.holder
    handler._op_executor = type(handler._op_executor)(handler._this_node, found.holder, handler._settings)
    handler._keep_alive_timer = None
    handler._start_heartbeats()
