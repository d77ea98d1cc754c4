"""The scheduler's table: which process has which rank, who is alive, who may come in. Pure: time is an argument.

A *place* is one of the job's ranks, named by its node id. A process takes a place by registering; it gets an
*incarnation*, a random name that no other process has. A *group* is formed when every place has a living process that
is in none yet; then ranks are final, rank 0 hosts the group's store, and all are told. A process is in one group: after
a death the others start over, and the next *generation* is a group of new incarnations. `ProcessState` says what
becomes of a process, and `_NEXT` what may come after what.

Promises, which ``tests/simulation/cluster.py`` plays thousands of schedules against:

* A node id that a user has given keeps the rank that it has once got; one that the table gave until its place is taken
  by name.
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
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from mindx_elastic.alarm.exit_codes import EXIT_ERROR
from mindx_elastic.cluster import messages
from mindx_elastic.cluster.messages import MAX_WORKERS, NODE_ID, Farewell, Identity, Register
from mindx_elastic.core.fields import Between, read
from mindx_elastic.core.printable import listed

__all__ = ["JobOutcome", "Limits", "ProcessState", "RankPlace", "Table"]

_SCHEMA = 4
_NUMBERS = re.compile(r"(\d+)")
_SHOWN = 8
_RECONNECT_S = 1.0
_AWAY_S = 60.0
"""How long a place is kept for a process that starts over in it, from those that do not ask for it by name."""


class ProcessState(str, enum.Enum):
    """What became of the process that has a place."""

    WAITING = "waiting"
    """It lives, and waits for the next group."""
    TRAINING = "training"
    """It lives, in the group that was formed last."""
    DEAD = "dead"
    """It has ended without finishing; its place waits for another process."""
    AWAY = "away"
    """It has said that it comes back in place; else as DEAD."""
    LEFT = "left"
    """It was stopped and has left with its state saved."""
    DONE = "done"
    """Its training is finished."""

    @property
    def lives(self) -> bool:
        """Whether it is heard within the heartbeat."""
        return self in (ProcessState.WAITING, ProcessState.TRAINING)

    @property
    def is_missed(self) -> bool:
        """Whether it is not in the group any more, and the training of its rank is not over."""
        return self in (ProcessState.WAITING, ProcessState.DEAD, ProcessState.AWAY)


_NEXT = {
    ProcessState.WAITING: {ProcessState.TRAINING, ProcessState.DEAD},
    ProcessState.TRAINING: {ProcessState.DEAD, ProcessState.AWAY, ProcessState.LEFT, ProcessState.DONE},
    ProcessState.DEAD: {ProcessState.WAITING},
    ProcessState.AWAY: {ProcessState.WAITING},
    ProcessState.LEFT: {ProcessState.WAITING},
    ProcessState.DONE: set(),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Durations in seconds."""

    heartbeat_s: float = 5.0
    """A process that is not heard for so long is dead."""
    formation_s: float = 600.0
    """How long all places may take to have a process, at the start and after a death."""

    @property
    def reconnect_s(self) -> float:
        """A process whose connection has ended is dead unless it connects again within this time."""
        return min(_RECONNECT_S, self.heartbeat_s)


@dataclass(kw_only=True)
class RankPlace:
    """One of the job's ranks, and its process."""

    node_id: messages.NodeId
    named: bool
    """By the user, not by the table."""
    process: Identity
    incarnation: messages.Incarnation
    store: tuple[messages.Name, messages.Port]
    """That this process hosts, for the group in which it is rank 0."""
    state: ProcessState = ProcessState.WAITING
    rank: messages.Rank | None = None
    code: int = 0
    """Exit code of a process that has LEFT."""
    why: messages.Why = ""
    """What ended it."""

    def __str__(self) -> str:
        rank = "a worker" if self.rank is None else f"rank {self.rank}"
        return f"{rank} (node id {self.node_id}, {self.process})"


@dataclass(frozen=True)
class JobOutcome:
    """How the job has ended."""

    code: int
    why: messages.Why = ""
    """Empty: all training is finished."""


@dataclass
class _Formed:
    """The group that was formed last."""

    generation: messages.Generation
    store: tuple[messages.Name, messages.Port]


@dataclass
class _Patience:
    """How long a place is kept for its process, which lives or is AWAY."""

    place: RankPlace
    until: float
    lost_why: str = ""
    """Why it is not connected; empty: it is."""


@dataclass
class _OnDisk:
    """What a scheduler that is started again must know."""

    schema: int
    job: messages.Name
    size: Annotated[int, Between(1, MAX_WORKERS)]
    places: list[RankPlace]
    group: _Formed | None
    lost_why: messages.Why
    outcome: JobOutcome | None


class Table:
    """One per job. Single-threaded; every method that takes `now` (seconds, any monotonic clock) is an event."""

    def __init__(self, size: int, *, job: str, recovery: bool, limits: Limits, now: float) -> None:
        self.size, self.job, self.recovery, self.limits = size, job, recovery, limits
        self.places: dict[str, RankPlace] = {}
        self._patience: dict[str, _Patience] = {}
        """By incarnation. Not on disk: it says how this scheduler has heard of them."""
        self.group: _Formed | None = None
        self.outcome: JobOutcome | None = None
        self.outbox: list[tuple[str, messages.Message]] = []
        """What is to be told, and to which incarnation."""
        self.notes: list[str] = []
        """What is to be said of deaths."""
        self.changed = True
        """Whether what `to_json` gives has changed since the caller last set this to False."""
        self._waiting_since: float | None = now
        self._lost_why = ""  # the last death, for the reason of a job that does not come back

    # --- what there is ---

    @property
    def generation(self) -> int:
        """Of the group that was formed last; -1: none."""
        return -1 if self.group is None else self.group.generation

    def living(self) -> list[RankPlace]:
        return [place for place in self.places.values() if place.state.lives]

    def find(self, incarnation: str) -> RankPlace | None:
        return next((m for m in self.places.values() if m.incarnation == incarnation), None)

    def _alive(self, incarnation: str) -> RankPlace | None:
        patience = self._patience.get(incarnation)
        return patience.place if patience is not None and patience.place.state.lives else None

    # --- events ---

    def register(self, who: Register, now: float) -> None:
        """A process connects, or connects again. It is told `Welcome`, `Refused` or `Dead`."""
        answer = self._answer(who, now)
        self.outbox.append((who.incarnation, answer))
        place = self._alive(who.incarnation)
        if isinstance(answer, messages.Welcome) and place is not None:
            if place.state is ProcessState.TRAINING:
                self._tell_group(place)
            self._form()

    def _tell_group(self, place: RankPlace) -> None:
        """To a process that has connected again: what it may not have heard of its group, the deaths too."""
        self.outbox.append((place.incarnation, self._group_message(place)))
        for other in self.places.values():
            if other.state.is_missed:
                why = self._lost_why or f"{other} has left the group"
                self.outbox.append((place.incarnation, messages.Death(other.rank or 0, why)))

    def _answer(self, who: Register, now: float) -> messages.Welcome | messages.Refused | messages.Dead:
        if refused := self._refusal(who):
            return messages.Refused(refused, is_over=self.outcome is not None)
        known = self.find(who.incarnation)
        if known is not None and self.hear(who.incarnation, now):
            return self._welcome(known)
        if known is not None or who.job:
            why = known.why if known is not None else "another process has taken its place"
            return messages.Dead(f"the scheduler holds this process for dead: {why}")
        place = self._place_for(who, now)
        if not isinstance(place, RankPlace):
            return place
        if place.node_id in self.places:
            self._move(place, ProcessState.WAITING)
            self._patience.pop(place.incarnation, None)
            place.incarnation, place.process, place.store = who.incarnation, who.process, who.store
            place.why, place.code = "", 0
        if who.node_id not in ("", place.node_id):
            del self.places[place.node_id]
            place.node_id, place.named = who.node_id, True
        self.places[place.node_id], self.changed = place, True
        self._patience[who.incarnation] = _Patience(place, now + self.limits.heartbeat_s)
        return self._welcome(place)

    def _move(self, place: RankPlace, state: ProcessState) -> None:
        assert state in _NEXT[place.state], f"{place} is {place.state.value}, and becomes {state.value}"
        place.state, self.changed = state, True

    def hear(self, incarnation: str, now: float) -> bool:
        """A heartbeat, or any other message. False: the process does not count any more."""
        if (place := self._alive(incarnation)) is None:
            return False
        self._patience[incarnation] = _Patience(place, now + self.limits.heartbeat_s)
        return True

    def lose(self, incarnation: str, now: float) -> None:
        """Its connection has ended. It may connect again."""
        if (place := self._alive(incarnation)) is not None:
            until = min(now + self.limits.reconnect_s, self._patience[incarnation].until)
            self._patience[incarnation] = _Patience(place, until, "its connection has ended")

    def die(self, incarnation: str, why: str, now: float) -> None:
        """Its process is gone, or has failed."""
        if (place := self._alive(incarnation)) is None:
            return
        del self._patience[incarnation]
        if self.generation < 0:
            del self.places[place.node_id]  # nothing depends on it yet
            self.changed = True
            self.notes.append(f"{place} is gone before the group is formed: {why}")
            return
        self._move(place, ProcessState.DEAD)
        place.why = why
        if self.outcome is not None:
            return  # as all have been told to
        text = f"{place} is dead: {why}"
        self._lost_why = text
        if not self.recovery:
            self.fail(f"{text}. MS_ENABLE_RECOVERY=1 is not set, so the job ends", place.rank)
            return
        assert place.rank is not None
        for other in self.living():
            self.outbox.append((other.incarnation, messages.Death(place.rank, text)))
        self._settle()
        if self.outcome is None:
            text += "; start it again with the same variables: the others wait for it"
        self.notes.append(text)

    def leave(self, incarnation: str, farewell: Farewell, now: float) -> None:
        """Its process says that it ends, and is told that this is noted."""
        how, code, why = farewell.how, farewell.code, farewell.why
        self.outbox.append((incarnation, messages.Noted()))
        if (place := self._alive(incarnation)) is None:
            return
        if how == "failed" or place.state is ProcessState.WAITING:
            self.die(incarnation, why or f"it has ended with exit code {code}", now)
            return
        self._move(place, ProcessState(how))
        place.code, place.why = code, why
        del self._patience[incarnation]
        if place.state is ProcessState.AWAY:
            self._patience[incarnation] = _Patience(place, now + _AWAY_S)
        self._settle()

    def forgive(self, held_s: float) -> None:
        """The scheduler itself was held up for so long: what it has not heard meanwhile says nothing of the workers."""
        for each in self._patience.values() if held_s > 0 else ():
            each.until += held_s

    def fail(self, why: str, rank: int | None = None) -> None:
        """The job is over for this reason, the death of `rank` if it names one."""
        self.outcome, self.changed = JobOutcome(EXIT_ERROR, why), True
        for place in self.living():
            self.outbox.append((place.incarnation, messages.Fail(why, rank)))

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.outcome is not None:
            return
        for place in self.living():
            patience = self._patience[place.incarnation]
            if now >= patience.until:
                why = patience.lost_why or f"it has sent nothing for {self.limits.heartbeat_s:g} s"
                self.die(place.incarnation, why, now)
        if self.group is not None and not any(m.state.is_missed for m in self.places.values()):
            self._waiting_since = None
            return
        since = self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if now >= since + self.limits.formation_s and self.outcome is None:
            missing = [str(m) for m in self.places.values() if m.state is not ProcessState.WAITING]
            num_there, unknown = len(self.places) - len(missing), self.size - len(self.places)
            what, why = "are there again", f"; {self._lost_why}"
            if self.group is None:
                what, why, missing = "have registered", "", [f"{unknown} that never registered"]
            self.fail(
                f"only {num_there} of {self.size} workers {what} within {self.limits.formation_s:g} s "
                f"(MS_TOPO_TIMEOUT){why}; missing: {listed(missing, _SHOWN)}"
            )

    # --- how it goes on ---

    def _refusal(self, who: Register) -> str:
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

    def _place_for(self, who: Register, now: float) -> RankPlace | messages.Refused:
        """The place that a new process takes; else why it gets none."""
        self.tick(now)
        if self.outcome is not None:
            return messages.Refused(self.outcome.why, is_over=True)
        place = self.places.get(who.node_id) or self._nameless_place(who, now)
        if place is not None and (until := self._held_until(place, who)) > now:
            why = (
                f"MS_NODE_ID={place.node_id} belongs to {place.process}, which is alive: a node id has one process. "
                "End that one, or give this one another MS_NODE_ID"
            )
            return messages.Refused(why, wait_s=until - now)
        over = [m for m in self.places.values() if m.state is ProcessState.DONE]
        if over:
            return messages.Refused(f"{over[0]} has finished its training already: the job is at its end")
        if self.generation >= 0 and not self.recovery:
            return messages.Refused("the job runs already, and takes in no other process without MS_ENABLE_RECOVERY=1")
        if place is None and len(self.places) >= self.size:
            return messages.Refused(self._full(who))
        return place or RankPlace(
            node_id=who.node_id or self._new_name(who.process.host),
            named=bool(who.node_id),
            process=who.process,
            incarnation=who.incarnation,
            store=who.store,
        )

    def _held_until(self, place: RankPlace, who: Register) -> float:
        """Until when the place is kept for the process that has it; 0: it is free for `who`."""
        if place.state.lives or (place.state is ProcessState.AWAY and place.node_id != who.node_id):
            return self._patience[place.incarnation].until
        return 0.0

    def _nameless_place(self, who: Register, now: float) -> RankPlace | None:
        """A free place of a process without a node id, for one that has no place, on its machine first."""
        found = [m for m in self.places.values() if not m.named and self._held_until(m, who) <= now]
        return min(found, key=lambda m: (m.process.host != who.process.host, _natural(m.node_id)), default=None)

    def _full(self, who: Register) -> str:
        free = [m.node_id for m in self.places.values() if not m.state.lives]
        name = f"node id {who.node_id}" if who.node_id else "a worker without MS_NODE_ID"
        if free:
            return (
                f"all {self.size} places have a node id, and {name} is not among them; a process is missing for "
                f"{listed(free, _SHOWN)}: set MS_NODE_ID to one of these"
            )
        return f"all {self.size} workers (MS_WORKER_NUM) are there already; {name} is one too many"

    def _new_name(self, host: str) -> str:
        base = host[:100] if re.fullmatch(NODE_ID, host[:100]) else "worker"
        return next(name for k in range(self.size + len(self.places) + 1) if (name := f"{base}-{k}") not in self.places)

    def _welcome(self, place: RankPlace) -> messages.Welcome:
        return messages.Welcome(self.job, place.node_id, self.limits.heartbeat_s)

    def _form(self) -> None:
        """Form the next group, when every place has a process that waits for it and is connected."""
        are_there = len(self.places) == self.size and all(m.state is ProcessState.WAITING for m in self.places.values())
        if self.outcome is not None or not are_there or any(each.lost_why for each in self._patience.values()):
            return
        if self.group is None:
            self._assign_ranks()
        places = sorted(self.places.values(), key=lambda m: m.rank or 0)
        self.group = _Formed(self.generation + 1, places[0].store)
        self._waiting_since = None
        for place in places:
            self._move(place, ProcessState.TRAINING)
            self.outbox.append((place.incarnation, self._group_message(place)))

    def _assign_ranks(self) -> None:
        """Before the first group: an integer node id is its rank, the others follow in natural order."""
        numbers = [str(rank) for rank in range(self.size)]
        others = iter(sorted(self.places.keys() - set(numbers), key=_natural))
        for rank, number in enumerate(numbers):
            self.places[number if number in self.places else next(others)].rank = rank

    def _group_message(self, place: RankPlace) -> messages.Group:
        """What a process needs to enter the group that was formed last."""
        assert self.group is not None and place.rank is not None
        near = sorted(m.rank for m in self.places.values() if m.rank is not None and self._are_near(m, place))
        host, port = self.group.store
        return messages.Group(
            generation=self.group.generation,
            rank=place.rank,
            size=self.size,
            local_rank=near.index(place.rank),
            local_size=len(near),
            host=host,
            port=port,
        )

    @staticmethod
    def _are_near(one: RankPlace, other: RankPlace) -> bool:
        """Whether both are on one machine."""
        if one.process.space and other.process.space:
            return one.process.space == other.process.space
        return one.process.host == other.process.host

    def _settle(self) -> None:
        """Conclude when no process is left that could go on, and none is waited for."""
        if self.outcome is not None or self.generation < 0:
            return
        places = sorted(self.places.values(), key=lambda m: m.rank or 0)
        states = {m.state for m in places}
        if self.living():
            # New processes for dead ones wait for a group that a finished rank will never be in.
            is_over = ProcessState.DONE in states and not states & {ProcessState.AWAY, ProcessState.TRAINING}
            if self._lost_why and is_over:
                self.fail(f"{self._lost_why}; the other ranks have finished")
            return
        left = [m for m in places if m.state is ProcessState.LEFT]
        if states == {ProcessState.DONE}:
            self.outcome = JobOutcome(0)
        elif left:
            codes = [m for m in left if m.code] or left
            self.outcome = JobOutcome(
                codes[0].code, f"{codes[0]} has left with exit code {codes[0].code}: {codes[0].why}"
            )
        elif ProcessState.DONE in states:
            self.outcome = JobOutcome(EXIT_ERROR, f"{self._lost_why}; the other ranks have finished")
        # else: all are dead, and any of them may be started again

    # --- on disk ---

    def to_json(self) -> dict[str, Any]:
        """All that a scheduler that is started again must know."""
        places = list(self.places.values())
        return asdict(_OnDisk(_SCHEMA, self.job, self.size, places, self.group, self._lost_why, self.outcome))

    @classmethod
    def from_json(cls, content: Mapping[str, Any], *, recovery: bool, limits: Limits, now: float) -> Table:
        """The table as `to_json` gave it. Each process that was alive has a whole heartbeat to be heard again.

        Raises ValueError for anything else, and where ranks or node ids contradict each other.
        """
        if content.get("schema") != _SCHEMA:
            raise ValueError(f"schema {content.get('schema')!r:.20} is not known")
        found = read(_OnDisk, content)
        table = cls(found.size, job=found.job, recovery=recovery, limits=limits, now=now)
        table.places = {each.node_id: each for each in found.places}
        table.group, table._lost_why, table.outcome = found.group, found.lost_why, found.outcome
        for each in found.places:
            if each.state.lives:
                why = f"it has not connected again within {limits.heartbeat_s:g} s"
                table._patience[each.incarnation] = _Patience(each, now + limits.heartbeat_s, why)
            elif each.state is ProcessState.AWAY:
                table._patience[each.incarnation] = _Patience(each, now + _AWAY_S)
        ranks = [m.rank for m in found.places if m.rank is not None]
        if len(set(ranks)) != len(ranks) or any(rank >= table.size for rank in ranks):
            raise ValueError("two node ids have one rank, or a rank is outside of the job")
        if len(table.places) != len(found.places) or len(table.places) > table.size:
            raise ValueError("a node id is there twice, or there are more of them than ranks")
        if table.group is not None and len(ranks) != table.size:
            raise ValueError("a group was formed, and a rank has no node id")
        return table


def _natural(text: str) -> list[Any]:
    """Sorts ``worker-2`` before ``worker-10``."""
    parts = _NUMBERS.split(text)
    return [(int(part), "") if number % 2 else (0, part) for number, part in enumerate(parts)]
