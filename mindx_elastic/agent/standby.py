"""Standby nodes: how another node takes the place of a lost one, without a meeting of all nodes.

The first node's agent offers the place in the store of the rendezvous: where the board of the recovery is, which ranks
and how many. An agent that is started while the job runs (`Standby`) does not go into the rendezvous, where all nodes
would have to meet anew, but waits in front of it, and claims an offered place with a note on the board, which only the
first of several can write. Then it puts itself in the lost node's place in the state of torch's rendezvous as well, so
that the nodes are complete there, and the next restart finds it.

Where this store is lost with its host no place can be offered, and who waits in front of the rendezvous ends as the
job does: without it, nodes cannot meet.

None of it is sealed, as nothing that torch has in that store; the board is.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Annotated, Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import Between, Text, read
from mindx_elastic.core.printable import printable

__all__ = [
    "NodePlace",
    "Standby",
    "identify",
    "offer",
    "root_store",
    "round_store",
    "tell_nodes",
]

_PREFIX = "mindx-elastic"
_LOOK_S = 0.1
_PATIENCE_S = 10.0
_TRIES = 20
_MOST_CHARS = 4000


_Name = Annotated[str, Text(100, "[A-Za-z0-9]+")]


@dataclass(frozen=True)
class NodePlace:
    """Of a lost node."""

    name: _Name
    """Of this offer, which no other one has."""
    node: int
    num_nodes: int
    ranks: Annotated[int, Between(1, 1 << 16)]
    """How many processes the node has to start."""
    first: int
    """The first of its ranks."""
    address: str
    port: int
    """Of the workers' store."""
    agent_port: int
    """Of the first agent's `heartbeat.HeartbeatServer`."""
    scope: _Name
    generation: Annotated[int, Between(1, 1 << 30)]
    attempt: Annotated[int, Between(0, 10**9 - 1)]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> NodePlace:
        """Raises ValueError, RecursionError for anything else."""
        place = read(cls, json.loads(text[:_MOST_CHARS]))
        if place.node >= place.num_nodes:
            raise ValueError(f"a place of node {place.node} of {place.num_nodes}")
        return place


def root_store(handler: RendezvousHandler) -> Any:
    """The store of torch's dynamic rendezvous, below its rounds; None: this torch does it otherwise."""
    return getattr(handler, "_store", None)


def offer(store: Any, run_id: str, place: NodePlace | None) -> None:
    """None: there is no place any more. Blocks; raises what torch raises."""
    store.set(f"{_PREFIX}/{run_id}/place", "" if place is None else place.to_json())


def tell_nodes(store: Any, run_id: str, num_nodes: int) -> None:
    """How many nodes the attempt under way has. Blocks; raises what torch raises."""
    store.set(f"{_PREFIX}/{run_id}/nodes", str(num_nodes))


def identify(store: Any, run_id: str) -> str:
    """The name of this very store, which no other one has; it gets one if it has none. Blocks; raises what torch
    raises."""
    return bytes(store.compare_set(f"{_PREFIX}/{run_id}/store", "", secrets.token_hex(8))).decode(errors="replace")


class _Redundant(Exception):
    """The rendezvous is complete without this node."""


class Standby:
    """Waits in front of a rendezvous while its job runs without this node. Main thread.

    Uses torch's private attributes; where they are not as in the versions known here, nobody waits, and the rendezvous
    does what it always did.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        claim: Callable[[NodePlace], bool],
        why_not: Callable[[NodePlace], str],
        stand_by: Callable[[], None] = lambda: None,
    ) -> None:
        """`claim`: whether the place is this node's now; raises what a board raises. `why_not`: why this node cannot
        take it; empty: it can. `stand_by` is called when it begins to wait."""
        self._handler, self._claim, self._why_not, self._stand_by = handler, claim, why_not, stand_by
        self._passed: set[str] = set()
        self.was_out = False
        """This node was taken for lost: the others go on, and torch may not know yet that it is none of them."""

    def seek(self) -> NodePlace | None:
        """The place that is this node's now; None: go into the rendezvous."""
        needed = ("_store", "_state_holder", "_this_node", "_heartbeat_lock")
        if any(getattr(self._handler, name, None) is None for name in needed):
            return None
        handler: Any = self._handler
        store, own, run_id = handler._store, handler._this_node, handler.get_run_id()
        most = getattr(getattr(handler, "settings", None), "max_nodes", 0)
        short_since: float | None = None  # the job has had fewer nodes than it had
        is_told = False
        while True:
            state = self._state(handler._state_holder)
            if state is None or state.closed or not state.complete:
                return None
            place = self._offered(store, run_id)
            if place is not None and self._takes(place):
                return place
            present, num_nodes = len(state.participants), self._num_nodes(store, run_id)
            if own in state.participants and not (self.was_out and present == num_nodes):
                return None  # this is a restart
            if present >= most:
                short_since = None
            elif present >= num_nodes:
                return None  # none is lost: the job is to have one node more
            else:
                short_since = short_since or time.monotonic()
                if time.monotonic() - short_since > _PATIENCE_S:
                    return None
            if not is_told:
                is_told = True
                logger.info("the job runs on %d nodes; this one waits for a place", present)
                self._stand_by()
            time.sleep(_LOOK_S)

    def next_rendezvous(self) -> tuple[NodePlace | None, RendezvousInfo | None]:
        """As `seek`, and where there is no place, a meeting: exactly one of the two. A node that has come to a meeting
        which is over without it waits in front of the next one."""
        while True:
            place, self.was_out = self.seek(), False
            if place is not None:
                return place, None
            with suppress(_Redundant), self._watched():
                return None, self._handler.next_rendezvous()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Within it, torch's wait for a meeting ends with `_Redundant` where that is over, and needs no more nodes."""
        holder: Any = getattr(self._handler, "_state_holder", None)
        own = getattr(self._handler, "_this_node", None)
        if holder is None or own is None:
            yield
            return
        sync = holder.sync

        def sync_and_look() -> Any:
            done, state = sync(), holder.state
            if state.complete and not state.closed and own in getattr(state, "redundancy_list", ()):
                raise _Redundant
            return done

        holder.sync = sync_and_look
        try:
            yield
        finally:
            del holder.sync

    def _state(self, holder: Any) -> Any:
        with self._handler._heartbeat_lock:  # type: ignore[attr-defined]
            holder.sync()
        state = holder.state
        names = ("closed", "complete", "participants", "wait_list", "last_heartbeats")
        return state if all(hasattr(state, name) for name in names) else None

    def _offered(self, store: Any, run_id: str) -> NodePlace | None:
        key = f"{_PREFIX}/{run_id}/place"
        text = store.get(key) if store.check([key]) else b""
        if not text:
            return None
        try:
            place = NodePlace.from_json(text)
        except (ValueError, RecursionError) as error:
            said = printable(f"{type(error).__name__}: {error}", 200)
            if said not in self._passed:
                self._passed.add(said)
                logger.warning("the store of the rendezvous offers a place that makes no sense (%s)", said)
            return None
        return None if place.name in self._passed else place

    def _takes(self, place: NodePlace) -> bool:
        self._passed.add(place.name)
        reason = self._why_not(place)
        try:
            if not reason and not self._claim(place):
                reason = "another node was faster"
        except Exception as error:  # any of torch's: its store is gone
            reason = printable(f"{type(error).__name__}: {error}", 200).partition("\n")[0]
        if not reason and not self._register(place):
            logger.warning("torch's rendezvous does not take this node in the place of node %d", place.node)
        if reason:
            logger.info("the place of node %d is not taken: %s", place.node, reason)
        return not reason

    def _register(self, place: NodePlace) -> bool:
        """In the state of torch's rendezvous this node is the lost one now."""
        handler: Any = self._handler
        holder, own = handler._state_holder, handler._this_node
        with suppress(AttributeError):
            for _ in range(_TRIES):
                with handler._heartbeat_lock:
                    holder.sync()
                    state = holder.state
                    for other, rank in list(state.participants.items()):
                        if rank == place.node and other != own:
                            del state.participants[other]
                            state.last_heartbeats.pop(other, None)
                    state.wait_list.discard(own)
                    state.participants[own] = place.node
                    state.last_heartbeats[own] = datetime.now(timezone.utc)
                    holder.mark_dirty()
                    done = holder.sync()
                if done:
                    handler._stop_heartbeats()
                    handler._start_heartbeats()
                    return True
        return False

    @staticmethod
    def _num_nodes(store: Any, run_id: str) -> int:
        key = f"{_PREFIX}/{run_id}/nodes"
        text = store.get(key) if store.check([key]) else b""
        return int(text) if text.isdigit() and len(text) < 7 else 0


def round_store(handler: RendezvousHandler) -> PrefixStore:
    """What torch's `next_rendezvous` hands out for the round under way."""
    return handler._get_store()  # type: ignore[attr-defined,no-any-return]
