"""The scheduler's table: which process has which rank, who is alive, who may come in. Pure: time is an argument.

A *place* is one of the job's ranks, named by its node id. A process takes a place by registering; it gets an
*incarnation*, a random name that no other process has. A *group* is formed when every place has a living process that
wants to be in the next *generation*; then ranks are final, one process hosts the group's store, and all are told.

    FREE ---register---> LIVING ---ends by itself---> DONE (training finished) or LEFT (stopped as it was told to)
     ^                     |
     '---register--- DEAD or AWAY (ended, or comes back in place; its place waits for a process)

Promises, tested by properties in ``tests/cluster/test_table.py``:

* A node id that has once got a rank keeps it.
* A place has at most one living process. A second one is refused until the first one's heartbeat has run out, or its
  death is seen.
* The table that `to_json` gives after any event, read back by a new scheduler, keeps both promises.

Each event method changes the table and puts what is to be told into `outbox`. The caller writes the table down before
it delivers that, so that a process knows nothing which a scheduler that is started again does not know.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mindx_elastic.core.printable import listed, printable

__all__ = ["MAX_WORKERS", "NODE_ID", "Limits", "Member", "Outcome", "Registration", "State", "Table", "Tell"]

MAX_WORKERS = 100_000
NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_SCHEMA = 1
_NUMBERS = re.compile(r"(\d+)")
_SHOWN = 8
_LONGEST_WHY = 2000
_TEXTS = ("node_id", "incarnation", "host", "started", "space", "why")
_IDENTITY = ("pid", "started", "space")
EXIT_ERROR = 1


class State(enum.Enum):
    """What became of the process that has a place."""

    LIVING = "living"
    """It has been heard within the heartbeat."""
    DEAD = "dead"
    """It has ended without finishing; its place waits for another process."""
    AWAY = "away"
    """It has said that it comes back in place; else as DEAD."""
    LEFT = "left"
    """It was stopped and has left with its state saved."""
    DONE = "done"
    """Its training is finished."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Durations in seconds."""

    heartbeat_s: float = 5.0
    """A process that is not heard for so long is dead."""
    reconnect_s: float = 1.0
    """A process on another machine whose connection has ended is dead unless it connects again within this time."""
    away_s: float = 60.0
    """How long a place is kept for a process that begins anew in it."""
    formation_s: float = 600.0
    """How long all places may take to have a process, at the start and after a death."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What a process says when it connects. Everything in it was checked for type and size by `wire`."""

    node_id: str
    """As the user has named it; empty: the table gives a name."""
    incarnation: str
    host: str
    pid: int
    started: str
    space: str
    """Equal for processes that can see each other's process ids; empty where that is not known."""
    size: int
    recovery: bool
    generation: int = -1
    """Of the group that it is in; -1: a new process."""
    joined: int = 0
    """The generation that it wants to be in."""
    job: str = ""
    """Of the scheduler that has admitted it; empty: a new process."""


@dataclass(kw_only=True)
class Member:
    """A place and its process."""

    node_id: str
    named: bool
    """By the user, not by the table."""
    incarnation: str
    host: str
    pid: int
    started: str
    space: str
    state: State = State.LIVING
    rank: int | None = None
    joined: int = 0
    code: int = 0
    """Exit code of a process that has LEFT."""
    why: str = ""
    """What ended it."""
    heard_at: float = 0.0
    lost_at: float | None = None
    """When its connection ended."""
    before: dict[str, Any] = field(default_factory=dict)
    """Who the process before this one was; empty: there was none."""

    def is_process_of(self, who: Registration) -> bool:
        """Whether `who` is this very process, which has begun anew."""
        return bool(self.space and self.started) and (self.pid, self.started, self.space) == (
            who.pid,
            who.started,
            who.space,
        )

    def __str__(self) -> str:
        rank = "a worker" if self.rank is None else f"rank {self.rank}"
        return f"{rank} (node id {self.node_id}, process {self.pid} on {self.host})"


@dataclass(frozen=True)
class Tell:
    """A message for one process."""

    incarnation: str
    message: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How the job has ended."""

    code: int
    why: str = ""
    """Empty: all training is finished."""


@dataclass
class _Group:
    """The group that was formed last."""

    generation: int
    attempt: int
    store: tuple[str, int]
    incarnations: list[str]
    """By rank."""
    new: list[int] = field(default_factory=list)
    """Ranks whose processes were not in the group before."""


class Table:
    """One per job. Single-threaded; every method that takes `now` (seconds, any monotonic clock) is an event."""

    def __init__(self, size: int, *, job: str, recovery: bool, limits: Limits, now: float) -> None:
        self.size, self.job, self.recovery, self.limits = size, job, recovery, limits
        self.members: dict[str, Member] = {}
        self.group: _Group | None = None
        self.outcome: Outcome | None = None
        self.outbox: list[Tell] = []
        self.notes: list[str] = []
        """What is to be said of processes that nobody need be told of."""
        self.changed = True
        """Whether what `to_json` gives has changed since the caller last set this to False."""
        self._host = ""  # the incarnation that was asked to open the next group's store
        self._waiting_since: float | None = now
        self._lost_why = ""  # the last death, for the reason of a job that does not come back

    # --- what there is ---

    @property
    def generation(self) -> int:
        """Of the group that was formed last; -1: none."""
        return -1 if self.group is None else self.group.generation

    def living(self) -> list[Member]:
        return [member for member in self.members.values() if member.state is State.LIVING]

    def find(self, incarnation: str) -> Member | None:
        return next((m for m in self.members.values() if m.incarnation == incarnation), None)

    def missing(self) -> list[str]:
        """The places without a living process, for a message."""
        named = [m for m in self.members.values() if m.state is not State.LIVING]
        unknown = self.size - len(self.members)
        return [str(m) for m in named] + ([f"{unknown} that never registered"] if unknown > 0 else [])

    # --- events ---

    def register(self, who: Registration, now: float) -> dict[str, Any]:
        """A process connects, or connects again. Returns the answer, an ``op`` of which only ``welcome`` lets it in."""
        refused = self._refusal(who)
        if refused:
            unknown = self.outcome is None and who.job not in ("", self.job)
            return {"op": "refused", "why": refused, "over": self.outcome is not None, "unknown": unknown}
        known = self.find(who.incarnation)
        if known is not None and known.state is State.LIVING:
            known.heard_at, known.lost_at = now, None
            if who.joined > known.joined:
                known.joined, self.changed = who.joined, True
            return self._welcome(known, now)
        if known is not None or who.generation >= 0:
            why = known.why if known is not None else "another process has taken its place"
            return {"op": "dead", "why": f"the scheduler holds this process for dead: {why}"}
        member, answer = self._place_for(who, now)
        if member is None:
            return answer
        if not member.is_process_of(who):
            member.before = {name: getattr(member, name) for name in _IDENTITY}
        member.incarnation, member.host, member.space = who.incarnation, who.host, who.space
        member.pid, member.started = who.pid, who.started
        member.state, member.why, member.code = State.LIVING, "", 0
        member.joined, member.heard_at, member.lost_at = self.generation + 1, now, None
        self.members[member.node_id], self.changed = member, True
        if self._waiting_since is None:
            self._waiting_since = now
        return self._welcome(member, now)

    def hear(self, incarnation: str, now: float) -> bool:
        """A heartbeat, or any other message. False: the process does not count any more."""
        member = self.find(incarnation)
        if member is None or member.state is not State.LIVING:
            return False
        member.heard_at, member.lost_at = now, None
        return True

    def lose(self, incarnation: str, now: float) -> None:
        """Its connection has ended. It may connect again."""
        member = self.find(incarnation)
        if member is not None and member.state is State.LIVING:
            member.lost_at = now

    def join(self, incarnation: str, generation: int, now: float) -> None:
        """A survivor is ready for the next generation."""
        member = self.find(incarnation)
        if member is not None and member.state is State.LIVING and generation > member.joined:
            member.joined, self.changed = generation, True
        self._advance(now)

    def set_store(self, incarnation: str, generation: int, store: tuple[str, int], now: float) -> None:
        """The host of the next group's store has opened it: the group is formed."""
        if incarnation != self._host or generation != self.generation + 1 or not self._is_whole():
            return
        members = sorted(self.members.values(), key=lambda m: m.rank or 0)
        new = [rank for rank, member in enumerate(members) if self._is_new(member)]
        attempt = 0
        if self.group is not None:
            attempt = self.group.attempt + (len(new) == self.size)
        self.group = _Group(generation, attempt, store, [m.incarnation for m in members], new)
        self._host, self._waiting_since, self.changed = "", None, True
        for member in members:
            self.outbox.append(Tell(member.incarnation, self._group_message(member)))

    def die(self, incarnation: str, why: str, now: float) -> None:
        """Its process is gone, or has failed."""
        member = self.find(incarnation)
        if member is not None and member.state is State.AWAY:  # on its way back: nobody waits for it in a collective
            member.state, member.why, self.changed = State.DEAD, why, True
        if member is None or member.state is not State.LIVING:
            return
        self.changed = True
        if self.generation < 0:
            del self.members[member.node_id]  # nothing depends on it yet
            self.notes.append(f"{member} is gone before the group is formed: {why}")
            self._host = ""
            return
        member.state, member.why = State.DEAD, why
        text = f"{member} is dead: {why}"
        self._host, self._lost_why = "", text
        if not self.recovery:
            self._fail(f"{text}. MS_ENABLE_RECOVERY=1 is not set, so the job ends", member.rank)
            return
        if self._waiting_since is None:
            self._waiting_since = now
        for other in self.living():
            self.outbox.append(
                Tell(
                    other.incarnation,
                    {"op": "death", "rank": member.rank, "node_id": member.node_id, "why": text}
                    | {"generation": self.generation},
                )
            )
        self._settle()

    def leave(self, incarnation: str, *, how: str, code: int, why: str, now: float) -> None:
        """Its process says that it ends. `how`: ``done``, ``left``, ``away`` or ``failed``."""
        member = self.find(incarnation)
        if member is None or member.state is not State.LIVING:
            return
        if how == "failed" or self.generation < 0:
            self.die(incarnation, why or f"it has ended with exit code {code}", now)
            return
        self.changed = True
        member.state = {"done": State.DONE, "left": State.LEFT, "away": State.AWAY}[how]
        member.code, member.why, member.heard_at = code, why, now
        self._host = ""
        if member.state is State.AWAY and self._waiting_since is None:
            self._waiting_since = now
        self._settle()

    def forgive(self, now: float) -> None:
        """The scheduler itself was held up: what it has not heard meanwhile says nothing about the workers."""
        for member in self.living():
            member.heard_at = now
            member.lost_at = None if member.lost_at is None else now

    def fail(self, why: str) -> None:
        """The job is over, for this reason."""
        if self.outcome is None:
            self._fail(why)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.outcome is not None:
            return
        for member in self.living():
            if now >= member.heard_at + self.limits.heartbeat_s:
                self.die(member.incarnation, f"it has sent nothing for {self.limits.heartbeat_s:g} s", now)
            elif member.lost_at is not None and now >= member.lost_at + self.limits.reconnect_s:
                self.die(member.incarnation, "its connection has ended", now)
        since = self._waiting_since
        if since is not None and now >= since + self.limits.formation_s and self.outcome is None:
            first = self.generation < 0
            what = "have registered" if first else "are there again"
            why = "" if first else f"; {self._lost_why}"
            self._fail(
                f"only {len(self.living())} of {self.size} workers {what} within {self.limits.formation_s:g} s "
                f"(MS_TOPO_TIMEOUT){why}; missing: {listed(self.missing(), _SHOWN)}"
            )

    def next_deadline(self) -> float | None:
        """When `tick` is due next."""
        times = [m.heard_at + self.limits.heartbeat_s for m in self.living()]
        times += [m.lost_at + self.limits.reconnect_s for m in self.living() if m.lost_at is not None]
        if self._waiting_since is not None:
            times.append(self._waiting_since + self.limits.formation_s)
        return min(times, default=None)

    # --- how it goes on ---

    def _refusal(self, who: Registration) -> str:
        """Why this process cannot come in, whatever the place; empty: nothing speaks against it."""
        if self.outcome is not None:
            return f"the job is over: {self.outcome.why or 'its training is finished'}"
        if who.job not in ("", self.job):
            return (
                "this scheduler does not know the job that this worker is in: it was started without the table of the "
                "first one. Start it with the same MS_RECOVERY_PATH"
            )
        if who.size != self.size:
            return f"MS_WORKER_NUM={who.size} here and {self.size} at the scheduler; give all processes the same number"
        if who.recovery != self.recovery:
            here, there = (("1" if on else "0") for on in (who.recovery, self.recovery))
            return f"MS_ENABLE_RECOVERY={here} here and {there} at the scheduler; give all processes the same"
        return ""

    def _place_for(self, who: Registration, now: float) -> tuple[Member | None, dict[str, Any]]:
        """The place that a new process takes; None: it gets none, for the reason in the answer."""
        self.tick(now)
        if self.outcome is not None:
            return None, {"op": "refused", "why": self.outcome.why, "over": True}
        member = self.members.get(who.node_id) if who.node_id else self._nameless_place(who, now)
        if member is not None and (until := self._held_until(member, who)) > now:
            holder = f"process {member.pid} on {member.host}"
            return None, {"op": "taken", "by": holder, "wait_s": until - now, "node_id": member.node_id}
        over = [m for m in self.members.values() if m.state is State.DONE]
        if over:
            return None, {"op": "refused", "why": f"{over[0]} has finished its training already: the job is at its end"}
        if self.generation >= 0 and not self.recovery:
            why = "the job runs already, and takes in no other process without MS_ENABLE_RECOVERY=1"
            return None, {"op": "refused", "why": why}
        if member is not None:
            return member, {}
        if len(self.members) >= self.size:
            return None, {"op": "refused", "why": self._full(who)}
        return (
            Member(
                node_id=who.node_id or self._new_name(who.host),
                named=bool(who.node_id),
                **{name: getattr(who, name) for name in ("incarnation", "host", "pid", "started", "space")},
            ),
            {},
        )

    def _held_until(self, member: Member, who: Registration) -> float:
        """Until when the place is kept for the process that has it; 0: it is free for `who`."""
        if member.is_process_of(who):
            return 0.0
        if member.state is State.AWAY:
            return member.heard_at + self.limits.away_s
        if member.state is not State.LIVING:
            return 0.0
        until = member.heard_at + self.limits.heartbeat_s
        return until if member.lost_at is None else min(until, member.lost_at + self.limits.reconnect_s)

    def _nameless_place(self, who: Registration, now: float) -> Member | None:
        """Where a process without a node id goes back to: its own place, else a free one, on its machine first."""
        found = [m for m in self.members.values() if not m.named and self._held_until(m, who) <= now]
        found = [m for m in found if m.state is not State.LIVING or m.is_process_of(who)]
        found.sort(key=lambda m: (not m.is_process_of(who), m.host != who.host, _natural(m.node_id)))
        return found[0] if found else None

    def _full(self, who: Registration) -> str:
        free = [m.node_id for m in self.members.values() if m.state is not State.LIVING]
        name = f"node id {who.node_id}" if who.node_id else "a worker without MS_NODE_ID"
        if free:
            return (
                f"all {self.size} places have a node id, and {name} is not among them; a process is missing for "
                f"{listed(free, _SHOWN)}: set MS_NODE_ID to one of these"
            )
        return f"all {self.size} workers (MS_WORKER_NUM) are there already; {name} is one too many"

    def _new_name(self, host: str) -> str:
        base = host[:100] if NODE_ID.fullmatch(host[:100]) else "worker"
        return next(
            name for k in range(self.size + len(self.members) + 1) if (name := f"{base}-{k}") not in self.members
        )

    def _welcome(self, member: Member, now: float) -> dict[str, Any]:
        answer = {
            "op": "welcome",
            "job": self.job,
            "node_id": member.node_id,
            "rank": member.rank,
            "generation": self.generation,
            "heartbeat_s": self.limits.heartbeat_s,
            "formation_s": self.limits.formation_s,
            "before": dict(member.before),
        }
        if member.joined <= self.generation:
            self.outbox.append(Tell(member.incarnation, self._group_message(member)))
        self._advance(now)
        return answer

    def _is_whole(self) -> bool:
        """Whether every place has a living process that wants to be in the next generation."""
        return (
            self.outcome is None
            and len(self.members) == self.size
            and all(m.state is State.LIVING and m.joined > self.generation for m in self.members.values())
        )

    def _advance(self, now: float) -> None:
        """Ask a process to open the next group's store, when every place is filled."""
        if not self._is_whole():
            self._host = ""
            return
        self._assign_ranks()
        by_rank = sorted(self.members.values(), key=lambda m: m.rank or 0)
        hosts = [m for m in by_rank if m.incarnation == self._host]
        host = hosts[0] if hosts else next((m for m in by_rank if not self._is_new(m)), by_rank[0])
        self._host = host.incarnation
        self.outbox.append(Tell(host.incarnation, {"op": "host", "generation": self.generation + 1}))

    def _is_new(self, member: Member) -> bool:
        """Whether its process was not in the group before."""
        return self.group is None or member.incarnation not in self.group.incarnations

    def _assign_ranks(self) -> None:
        """Ranks for places that have none: an integer node id is its rank, the others follow in natural order."""
        members = self.members.values()
        if all(m.rank is not None for m in members):
            return
        free = set(range(self.size)) - {m.rank for m in members}
        without = [m for m in members if m.rank is None]
        for member in without:
            wanted = int(member.node_id) if member.named and member.node_id.isdecimal() else -1
            if wanted in free and str(wanted) == member.node_id:
                member.rank = wanted
                free.remove(wanted)
        for member, rank in zip(
            sorted((m for m in without if m.rank is None), key=lambda m: _natural(m.node_id)),
            sorted(free),
            strict=True,
        ):
            member.rank = rank
        self.changed = True

    def _group_message(self, member: Member) -> dict[str, Any]:
        """What a process needs to enter the group that was formed last."""
        assert self.group is not None and member.rank is not None
        near = sorted(m.rank for m in self.members.values() if m.rank is not None and self._are_near(m, member))
        return {
            "op": "group",
            "generation": self.group.generation,
            "attempt": self.group.attempt,
            "rank": member.rank,
            "size": self.size,
            "local_rank": near.index(member.rank),
            "local_size": len(near),
            "store": list(self.group.store),
            "new": self.group.new,
        }

    @staticmethod
    def _are_near(one: Member, other: Member) -> bool:
        """Whether both are on one machine."""
        if one.space and other.space:
            return one.space == other.space
        return one.host == other.host

    def _fail(self, why: str, rank: int | None = None) -> None:
        why = why[:_LONGEST_WHY]
        self.outcome, self.changed = Outcome(EXIT_ERROR, why), True
        for member in self.living():
            self.outbox.append(Tell(member.incarnation, {"op": "fail", "why": why, "rank": rank}))

    def _settle(self) -> None:
        """Conclude when no process is left that could go on, and none is waited for."""
        if self.outcome is not None or self.generation < 0:
            return
        members = sorted(self.members.values(), key=lambda m: m.rank or 0)
        states = {m.state for m in members}
        if living := self.living():
            # New processes for dead ones wait for a group that a finished rank will never be in.
            is_over = State.DONE in states and State.AWAY not in states and all(map(self._is_new, living))
            if self._lost_why and is_over:
                self._fail(f"{self._lost_why}; the other ranks have finished")
            return
        left = [m for m in members if m.state is State.LEFT]
        self.changed = True
        if states == {State.DONE}:
            self.outcome = Outcome(0)
        elif left:
            codes = [m for m in left if m.code] or left
            self.outcome = Outcome(codes[0].code, f"{codes[0]} has left with exit code {codes[0].code}: {codes[0].why}")
        elif State.DONE in states:
            self.outcome = Outcome(EXIT_ERROR, f"{self._lost_why}; the other ranks have finished")
        # else: all are dead, and any of them may be started again

    # --- on disk ---

    def to_json(self) -> dict[str, Any]:
        """All that a scheduler that is started again must know."""
        volatile = ("heard_at", "lost_at", "before")
        members = [
            {key: value for key, value in asdict(m).items() if key not in volatile} | {"state": m.state.value}
            for m in self.members.values()
        ]
        return {
            "schema": _SCHEMA,
            "job": self.job,
            "size": self.size,
            "members": members,
            "group": None if self.group is None else asdict(self.group) | {"store": list(self.group.store)},
            "lost_why": self._lost_why,
            "outcome": None if self.outcome is None else asdict(self.outcome),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], *, recovery: bool, limits: Limits, now: float) -> Table:
        """The table as `to_json` gave it. Each process that was alive has a whole heartbeat to be heard again.

        Raises ValueError for anything else, and where ranks or node ids contradict each other.
        """
        try:
            table = cls._read(content, recovery=recovery, limits=limits, now=now)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a scheduler's table ({type(error).__name__}: {error})") from None
        ranks = [m.rank for m in table.members.values() if m.rank is not None]
        if len(set(ranks)) != len(ranks) or any(not 0 <= rank < table.size for rank in ranks):
            raise ValueError("two node ids have one rank, or a rank is outside of the job")
        if len(table.members) > table.size or (table.group is not None and len(ranks) != table.size):
            raise ValueError("it has another number of node ids than of ranks")
        return table

    @classmethod
    def _read(cls, content: Mapping[str, Any], *, recovery: bool, limits: Limits, now: float) -> Table:
        if content["schema"] != _SCHEMA:
            raise ValueError(f"schema {printable(content['schema'], 20)} is not known")
        size = _whole(content["size"], 1, MAX_WORKERS)
        table = cls(size, job=_text(content["job"], 64), recovery=recovery, limits=limits, now=now)
        for each in content["members"]:
            texts: dict[str, Any] = {name: _text(each[name], 1000) for name in _TEXTS}
            member = Member(
                **texts,
                named=each["named"] is True,
                pid=_whole(each["pid"], 0, 1 << 31),
                state=State(each["state"]),
                rank=None if each["rank"] is None else _whole(each["rank"], 0, size - 1),
                joined=_whole(each["joined"], 0, 1 << 31),
                code=_whole(each["code"], 0, 255),
                heard_at=now,
            )
            if member.node_id in table.members:
                raise ValueError(f"node id {printable(member.node_id, 100)} is there twice")
            table.members[member.node_id] = member
        if (group := content["group"]) is not None:
            host, port = group["store"]
            table.group = _Group(
                _whole(group["generation"], 0, 1 << 31),
                _whole(group["attempt"], 0, 1 << 31),
                (_text(host, 300), _whole(port, 1, 65535)),
                [_text(each, 64) for each in group["incarnations"]],
                [_whole(rank, 0, size - 1) for rank in group["new"]],
            )
        table._lost_why = _text(content["lost_why"], _LONGEST_WHY)
        if (outcome := content["outcome"]) is not None:
            table.outcome = Outcome(_whole(outcome["code"], 0, 255), _text(outcome["why"], _LONGEST_WHY))
        if table.group is not None and table._is_running():
            table._waiting_since = None
        return table

    def _is_running(self) -> bool:
        assert self.group is not None
        return {m.incarnation for m in self.living()} == set(self.group.incarnations)


def _natural(text: str) -> list[Any]:
    """Sorts ``worker-2`` before ``worker-10``."""
    parts = _NUMBERS.split(text)
    return [(int(part), "") if number % 2 else (0, part) for number, part in enumerate(parts)]


def _whole(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{printable(value, 40)} where a whole number from {low} to {high} belongs")
    return value


def _text(value: Any, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError(f"{printable(value, 40)} where a text of at most {limit} characters belongs")
    return value
