"""This node among those of the job: how its agent meets the others, hears of them, and ends together with them.

All agents connect to one table (`cluster.table`), which the agent at the endpoint serves in a thread (`host_table`).
When nothing is heard any more, the host of the table counts as lost. The workers' collectives and their store do not
pass here.

An agent whose ranks have finished says so, and waits for the others' word. All come to the same conclusion:

* all have finished: the job has;
* one meets the others again, because a rank of it has failed, or is lost with what its ranks had still to save: all
  meet again. If the last boundary is on disk, that attempt trains nothing, and runs what follows the training;
* one was stopped: so is the job.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from mindx_elastic.agent.endings import GRACEFUL_CODES, Ending
from mindx_elastic.agent.inbox import SignalInbox
from mindx_elastic.alarm.alarm import signal_name
from mindx_elastic.alarm.exit_codes import EXIT_ERROR, EXIT_TEMPORARY, exit_code_of_signal
from mindx_elastic.cluster import messages
from mindx_elastic.cluster.connection import TableConnection
from mindx_elastic.cluster.scheduler import TableServer, is_own_address, listen
from mindx_elastic.cluster.table import Limits, Table
from mindx_elastic.core.events import logger
from mindx_elastic.core.wakeup import Wakeup

__all__ = ["HostLostError", "Membership", "NodeHost", "host_table"]

_PORT = 29400  # torch's
_CONNECT_S, _MEET_S, _LAST_CALL_S = 60, 600, 30
"""Torch's `read_timeout`, `join_timeout` and `last_call_timeout`."""
_HEARTBEAT_S = 15.0
_HOST_AGAIN_S = 4.0  # the platform may start it again at once
_ASK_S = 5.0
_LOST_S = 12.0
_END_S = 300.0
"""As long nodes that live are waited for, when the training has ended here. Torch's own."""
_HURRY_S = 5.0
_LEAVE_S = 2.0
_AGAIN_S = 0.5  # for a node that is between two attempts
_LOOK_S = 0.1


class HostLostError(RendezvousError):
    """The agent that hosts the table is gone or does not answer any more: no nodes can meet."""


def host_table(parameters: RendezvousParameters, key: bytes | None) -> NodeHost | None:
    """Serve the table, if the endpoint is of this machine and nothing listens there. ``is_host`` says it of an address
    that this machine does not know; with the static backend node 0 is the host. Raises ValueError."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _PORT)
    is_static = parameters.backend == "static"
    is_host = int(parameters.get("rank", 0)) == 0 if is_static else parameters.get_as_bool("is_host")
    if is_host is None:
        is_host = is_own_address(host)
    if not is_host:
        return None
    try:
        # A name may lead to one of several addresses, and to a loopback one on its own machine.
        listener = listen(host if host == "localhost" or _is_address(host) else "", port)
    except OSError as error:
        logger.debug("the table is not served at %s:%d by this agent: %s", host, port, error)
        return None
    beat_s, most_beats = parameters.get("keep_alive_interval", 5), parameters.get("keep_alive_max_attempt", 3)
    meet_s = float(parameters.get("join_timeout", _MEET_S))  # the last call is over before the members give up
    last_call_s = min(float(parameters.get("last_call_timeout", _LAST_CALL_S)), meet_s / 2)
    limits = Limits(
        heartbeat_s=float(beat_s) * int(most_beats), formation_s=math.inf, reconnect_s=3.0, last_call_s=last_call_s
    )
    job, now = secrets.token_hex(8), time.monotonic()
    least, run_id = parameters.min_nodes, parameters.run_id
    table = Table(parameters.max_nodes, least=least, run_id=run_id, job=job, recovery=True, limits=limits, now=now)
    return NodeHost(table, listener, key)


def _is_address(host: str) -> bool:
    """Whether it is no name."""
    with suppress(ValueError):
        ip_address(host)
        return True
    return False


class NodeHost(TableServer):
    """Serves the table of the agents in a thread."""

    def __init__(self, table: Table, listener: socket.socket, key: bytes | None) -> None:
        super().__init__(table, listener, key)
        self._ends_at: float | None = None
        self._closes_at = 0.0
        """Until then a member that has not left may be about to connect again."""
        self._thread = threading.Thread(target=self._run, name="mindx-nodes-host", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Serve until all have left, but no longer than that."""
        self._closes_at = time.monotonic() + _AGAIN_S
        self._ends_at = time.monotonic() + timeout_s
        self._thread.join(timeout_s + _LEAVE_S)

    def _run(self) -> None:
        while self._ends_at is None or (self._is_needed() and time.monotonic() < self._ends_at):
            self.turn()
        self.close_all()

    def _is_needed(self) -> bool:
        return bool(self.connections) or (self.table.places.num_living > 0 and time.monotonic() < self._closes_at)


class Membership(TableConnection):
    """This agent's connection to the table, from the job's start to its end. Main thread, unless a method says
    otherwise."""

    forgets = True

    def __init__(self, parameters: RendezvousParameters, key: bytes | None, *, workers: int, role: str) -> None:
        """workers, role: ``--nproc-per-node`` and ``--role``. Raises ValueError for an endpoint that is none."""
        host, port = parse_rendezvous_endpoint(parameters.endpoint, _PORT)
        is_static = parameters.backend == "static"
        node_id = str(int(parameters.get("rank", 0))) if is_static else ""
        super().__init__(host, port, key, node_id=node_id, heartbeat_s=_HEARTBEAT_S)
        # The other nodes know the name of `static`'s node 0, whose workers host their store, and maybe no other one.
        is_named = is_static and node_id == "0"
        self.address = parameters.local_addr or (host if is_named else socket.getfqdn())
        self._facts = {"run_id": parameters.run_id, "ranks": workers, "role": role}
        # The static backend has one time-out for all.
        self._connect_s = float(parameters.get("timeout" if is_static else "read_timeout", _CONNECT_S))
        self._meet_s = self._connect_s if is_static else float(parameters.get("join_timeout", _MEET_S))
        self._has_found = False
        """The table, once."""
        self._why_down = ""
        """Why the last connection has ended, or none could be opened."""
        self.wakeup = Wakeup()
        """Rings when `news` or `lost` may have changed."""

    # --- for the agent ---

    def meet(self, workers: int, restarts: int, port: int, check: Callable[[], None]) -> messages.Group:
        """Wait for the other nodes, and for the group that they form. `port`: for the workers' store. `check`: called
        again and again; what it raises ends the wait.

        Raises RendezvousError: HostLostError, or the nodes have not come in time, or do not meet any more.
        """
        began, store = time.monotonic(), (self.address, port)
        self.begin_anew(ranks=workers, restarts=restarts, store=store, has_finished=False)
        if self._thread.ident is None:
            self.down_since = began
            self.start()  # not before: the table could form a group that this agent does not know it wants
        with self.changed:
            while self.group is None:
                check()
                self._check_meeting(began)
                self.changed.wait(_LOOK_S)
            return self.group

    def _check_meeting(self, began: float) -> None:
        now, where = time.monotonic(), f"{self.host}:{self.port}"
        if self.refused or self.over is not None:
            raise RendezvousClosedError(self.refused or self.over.why)  # type: ignore[union-attr]
        down_s = 0.0 if self.down_since is None else now - max(began, self.down_since)
        if self._has_found and down_s > _HOST_AGAIN_S and not self.is_greeted:
            raise HostLostError(
                f"the rendezvous at {where} is gone with its host, so the nodes cannot meet: "
                "start the same command on all nodes, that one among them"
            )
        if not self._has_found and down_s > self._connect_s:
            raise RendezvousConnectionError(
                f"no agent of this job answers at {where} within {self._connect_s:g} s ({self._why_down}): start the "
                "same command on that machine too, with the same job key, and give a port that no other program uses"
            )
        if now > began + self._meet_s:
            raise RendezvousTimeoutError(f"too few nodes have come to {where} within {self._meet_s:g} s")

    def note_end(self, end: Ending) -> None:
        """How the attempt has ended here; the others hear of a failure when this node meets them again."""
        self._facts["why"] = end.cause[:500] if end.outcome == "failed" else ""

    def end_together(self, own: Ending, inbox: SignalInbox) -> Ending:
        """This node's ranks have finished: how the attempt has ended for all nodes. Waits for the others; after a
        signal for a moment only, for the host is about to end, too."""
        self.say(has_finished=True)
        until = time.monotonic() + _END_S
        with self.changed:
            while self.over is None and not self.news.missing and (now := time.monotonic()) < until:
                if inbox.first is not None:
                    until = min(until, now + _HURRY_S)
                if self.dead or (self.down_since is not None and now > self.down_since + _LOST_S):
                    break
                self.changed.wait(_LOOK_S)
        code = -1 if self.over is None else self.over.code
        if inbox.first is not None and code != 0:
            return Ending(outcome="stopped", code=exit_code_of_signal(inbox.first), cause=signal_name(inbox.first))
        if code == 0 or not self.lost:
            return own  # all have finished; or the others live, and take longer than that
        if (stopped := self.stopped_elsewhere) is not None:
            return stopped
        outcome, cause = "failed" if code in (-1, EXIT_ERROR) else "stopped", self.lost
        if code == -1 and self.news.missing:
            outcome = "failed" if self.news.failed else "membership"
            cause = f"node {self.news.missing[0]} has not ended: {cause}"
        return Ending(outcome=outcome, code=EXIT_TEMPORARY, cause=cause, elsewhere=True)

    @property
    def stopped_elsewhere(self) -> Ending | None:
        """The end of the job, where another node's agent was told to stop."""
        if self.over is None or self.over.code not in GRACEFUL_CODES:
            return None
        return Ending(outcome="stopped", code=self.over.code, cause=self.over.why, elsewhere=True)

    @property
    def lost(self) -> str:
        """Why a node is taken for lost, in words; empty while all are there."""
        if self.over is not None and self.over.code:
            return self.over.why
        if self.news.missing:
            return self.news.why
        return self.dead or ("" if self.down_since is None else "the rendezvous does not answer")

    def ask(self) -> messages.News:
        """What is new at this very moment; what was known before if no answer comes in time."""
        with self.changed:
            number, until = self.ask_now(), time.monotonic() + _ASK_S
            while self._num_answers < number and self.down_since is None and time.monotonic() < until:
                self.changed.wait(_LOOK_S)
            return self.news

    # --- the connection's thread ---

    def hear(self, message: messages.Message) -> None:
        self._has_found = True
        if self.refused:
            self.closed.set()
        self.wakeup.ring()

    def give_up(self, error: Exception) -> None:
        self.refused = f"{type(error).__name__}: {error}"
        logger.error("this node hears no more of the others: %s", self.refused)
        with self.changed:
            self.down_since = time.monotonic()  # else the end of the job would be waited for
        super().give_up(error)
        self.wakeup.ring()

    def tries_again(self, why: str) -> bool:
        logger.debug("the connection to the rendezvous has ended: %s", why)
        self._why_down = why
        self.wakeup.ring()
        with self.changed:
            while self.dead and not self.closed.is_set():
                self.changed.wait(_LOOK_S)  # until this node meets the others again
        return not self.closed.is_set()
