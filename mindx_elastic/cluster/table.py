"""The table of a job's members: who has which number, who is alive, who may come in. Pure: time is an argument.

A member is a worker that was started by hand and brings one rank, or the agent of a node and brings its ranks. A
*place* is a number among the members, named by a node id. A process takes a place by registering; it gets an
*incarnation*, a random name that nothing else has. A *group* is formed when no member of the last one trains any more,
and all that may take part wait, or enough of them for a while; the first member hosts the group's store, and all are
told. An incarnation is in one group: after a death the others start over, and the next *generation* is a group of new
incarnations. `ProcessState` says what becomes of one.

Workers are as many as the job has ranks, and keep their ranks. Agents may be fewer or more (``--nnodes MIN:MAX``), live
on from one group to the next, and keep their numbers as long as there are so many; one that was not heard is in its
group again if it is heard before the next. Who finds no room waits (a standby node).

Promises, which ``tests/simulation/cluster.py`` and ``agents.py`` play thousands of schedules against:

* A node id that a user has given keeps the rank that it has once got; one that the table gave until its place is taken
  by name.
* A place has at most one living process. A second one is refused until the first one's heartbeat has run out, or its
  death is seen.
* The table that `to_json` gives after any event, read back by a new scheduler, keeps both promises. An older one (the
  disk has lied) keeps the ranks that it knows. One that knows nothing forms the next group of the agents that come; the
  one that trains meanwhile it does not know.

Each event method changes the table and puts what is to be told into `outbox`. The caller writes the table down before
it delivers that, so that a process knows nothing which a scheduler that is started again does not know.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from mindx_elastic.alarm.exit_codes import EXIT_ERROR, EXIT_USAGE
from mindx_elastic.cluster import messages
from mindx_elastic.cluster.messages import MAX_WORKERS, NODE_ID, Farewell, Register
from mindx_elastic.cluster.places import IN_GROUP, MISSED, Place, Places, ProcessState
from mindx_elastic.core.fields import Between, read
from mindx_elastic.core.pace import Pace, SlowRank, slow_ranks
from mindx_elastic.core.printable import listed

__all__ = ["JobOutcome", "Limits", "Table"]

_SCHEMA = 5
_NUMBERS = re.compile(r"(\d+)")
_SHOWN = 8
_COMPARES_S = 1.0
_AWAY_S = 60.0
"""How long a place is kept for a process that starts over in it, from those that do not ask for it by name."""
_MOST_TOLD = 100
"""Numbers of missing members."""
_OVER = ProcessState.ENDED, ProcessState.LEFT, ProcessState.DONE


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Durations in seconds."""

    heartbeat_s: float = 5.0
    """A process that is not heard for so long is dead."""
    formation_s: float = 600.0
    """How long all places may take to have a process, at the start and after a death."""
    reconnect_s: float = 1.0
    """A process whose connection has ended is dead unless it connects again within this time, or the heartbeat's."""
    last_call_s: float = 0.0
    """How long fewer members than may take part wait for others."""


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

    place: Place
    until: float
    lost_why: str = ""
    """Why it is not connected; empty: it is."""


@dataclass
class _OnDisk:
    """What a scheduler that is started again must know."""

    schema: int
    job: messages.Name
    size: Annotated[int, Between(1, MAX_WORKERS)]
    places: list[Place]
    group: _Formed | None
    lost_why: messages.Why
    outcome: JobOutcome | None


class Table:
    """One per job. Single-threaded; every method that takes `now` (seconds, any monotonic clock) is an event."""

    def __init__(
        self,
        size: int,
        *,
        job: str,
        recovery: bool,
        limits: Limits,
        now: float,
        least: int | None = None,
        run_id: str = "",
    ) -> None:
        """`size`: members, at most where they are agents. `least`, `run_id`: of these; None: they are workers."""
        self.size, self.job, self.recovery, self.limits = size, job, recovery, limits
        self.least, self.of_agents, self._run_id = least or size, least is not None, run_id
        self.places = Places()
        self._patience: dict[str, _Patience] = {}
        """By incarnation. Not on disk: it says how this scheduler has heard of them."""
        self._due_at = math.inf
        """No patience ends before."""
        self.group: _Formed | None = None
        self.outcome: JobOutcome | None = None
        self.outbox: list[tuple[str, messages.Message]] = []
        """What is to be told, and to which incarnation."""
        self.notes: list[str] = []
        """What is to be said of deaths."""
        self.changed = True
        """Whether what `to_json` gives has changed since the caller last set this to False."""
        self._waiting_since: float | None = now
        self._form_at = math.inf
        self._told: object = None
        """What the last news were about."""
        self._groups: dict[str, messages.Group] = {}
        """What each member is told of the group that was formed last."""
        self._paces: dict[str, tuple[Pace, ...]] = {}  # of the group's members
        self._slow: tuple[SlowRank, ...] = ()
        self._compares_at = now
        self._lost_why = ""  # the last death, for the reason of a job that does not come back

    # --- what there is ---

    @property
    def generation(self) -> int:
        """Of the group that was formed last; -1: none."""
        return -1 if self.group is None else self.group.generation

    def find(self, incarnation: str) -> Place | None:
        return self.places.find(incarnation)

    def _alive(self, incarnation: str) -> Place | None:
        patience = self._patience.get(incarnation)
        return patience.place if patience is not None and patience.place.state.lives else None

    # --- events ---

    def register(self, who: Register, now: float) -> None:
        """A member connects, connects again, or says what has changed. It is told `Welcome`, `Refused` or `Dead`."""
        answer = self._answer(who, now)
        self.outbox.append((who.incarnation, answer))
        place = self._alive(who.incarnation)
        if isinstance(answer, messages.Welcome) and place is not None:
            if place.state.is_in_group:
                self._tell_group(place)
            self._go_on(now)

    def _tell_group(self, place: Place) -> None:
        """To a member that has connected again: what it may not have heard."""
        self.outbox.append((place.incarnation, self._groups[place.incarnation]))
        is_waiting, is_missing, _ = self._topics()
        if is_waiting or is_missing:
            self.outbox.append((place.incarnation, self._news()))

    def _answer(self, who: Register, now: float) -> messages.Welcome | messages.Refused | messages.Dead:
        known = self.find(who.incarnation)
        if refused := self._refusal(who):
            over = EXIT_USAGE if self.of_agents and not who.job else None  # each start of that command is refused
            if self.outcome is not None and not self._is_of_another_job(who):
                over = self.outcome.code
            return messages.Refused(refused, over=over)
        if known is not None and known.state is ProcessState.DEAD and self.of_agents:
            self._move(known, ProcessState.TRAINING)
            self._wait_for(known, now)
        if known is not None and known.state is ProcessState.WAITING and who.generation >= 0 and not self.of_agents:
            # The disk has lied: the others are held for dead, and the next group would have the number of this one.
            why = "this scheduler has an older table, without the group that it is in"
            self.die(who.incarnation, why, now)
            return messages.Dead(f"this process is held for dead: {why}")
        if known is not None and self.hear(who.incarnation, now):
            known.said = who if self.of_agents else known.said
            if who.has_finished and known.state is ProcessState.TRAINING:
                self._move(known, ProcessState.ENDED)
            return self._welcome(known)
        if known is not None or who.job:
            why = known.why if known is not None else "another process has taken its place"
            return messages.Dead(f"this process is held for dead: {why}")
        place = self._place_for(who, now)
        if not isinstance(place, Place):
            return place
        self._patience.pop(place.incarnation, None)
        self.places.take(place, who)
        self.changed = True
        self._wait_for(place, now + self.limits.heartbeat_s)
        return self._welcome(place)

    def _wait_for(self, place: Place, until: float, lost_why: str = "") -> None:
        self._patience[place.incarnation] = _Patience(place, until, lost_why)
        self._due_at = min(self._due_at, until)

    def _move(self, place: Place, state: ProcessState) -> None:
        self.places.move(place, state)
        self.changed = True

    def hear(self, incarnation: str, now: float) -> bool:
        """A heartbeat, or any other message. False: the process does not count any more."""
        if (place := self._alive(incarnation)) is None:
            return False
        self._patience[incarnation] = _Patience(place, now + self.limits.heartbeat_s)
        return True

    def slow(self, incarnation: str, paces: tuple[Pace, ...], now: float) -> tuple[SlowRank, ...]:
        """A member says how its ranks go. The ranks of the group that the others wait for, as far as is known."""
        if incarnation in self._groups:
            self._paces[incarnation] = paces
        if now >= self._compares_at:
            self._compares_at = now + _COMPARES_S
            every = [self._paces.get(each, ()) for each in self._groups]
            known = slow_ranks(pace for paces in every for pace in paces) if all(every) else ()
            self._slow = known[:_MOST_TOLD]
        return self._slow

    def lose(self, incarnation: str, now: float) -> None:
        """Its connection has ended. It may connect again."""
        if (place := self._alive(incarnation)) is not None:
            until = min(now + self.limits.reconnect_s, self._patience[incarnation].until)
            self._wait_for(place, until, "its connection has ended")

    def die(self, incarnation: str, why: str, now: float) -> None:
        """Its process is gone, or has failed."""
        if (place := self._alive(incarnation)) is None:
            return
        del self._patience[incarnation]
        if place.rank is None or (self.of_agents and not place.state.is_in_group):
            self.places.drop(place)
            self.changed = True
            self.notes.append(f"{place} is gone before the group is formed: {why}")
            self._go_on(now)
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
        self._go_on(now)
        if self.outcome is None and not self.of_agents:
            text += "; start it again with the same variables: the others wait for it"
        self.notes.append(text)

    def leave(self, incarnation: str, farewell: Farewell, now: float) -> None:
        """Its process says that it ends, and is told that this is noted."""
        how, code, why = farewell.how, farewell.code, farewell.why
        self.outbox.append((incarnation, messages.Noted()))
        if (place := self._alive(incarnation)) is None:
            return
        was_in_group = self.of_agents and place.rank is not None and self.outcome is None
        if how == "failed" or place.state is ProcessState.WAITING:
            self.die(incarnation, why or f"it has ended with exit code {code}", now)
            if how == "failed" and was_in_group and self.outcome is None:
                self.fail(f"{place} has ended the job: {why}", place.rank)
        else:
            self._move(place, ProcessState(how))
            place.code, place.why = code, why
            del self._patience[incarnation]
            if place.state is ProcessState.AWAY:
                self._patience[incarnation] = _Patience(place, now + _AWAY_S)
        if how == "left" and was_in_group and self.outcome is None:  # else a node whose ranks have failed would wait
            self._end(JobOutcome(code, f"{place} was stopped: {why}"))
        elif self.outcome is None:
            self._go_on(now)

    def forgive(self, held_s: float) -> None:
        """The scheduler itself was held up for so long: what it has not heard meanwhile says nothing of the members."""
        for each in self._patience.values() if held_s > 0 else ():
            each.until += held_s

    def fail(self, why: str, rank: int | None = None) -> None:
        """The job is over for this reason, the death of `rank` if it names one."""
        self._end(JobOutcome(EXIT_ERROR, why), rank)

    def _end(self, outcome: JobOutcome, rank: int | None = None) -> None:
        self.outcome, self.changed = outcome, True
        for place in self.places.living():
            self.outbox.append((place.incarnation, messages.Over(outcome.code, outcome.why, rank)))

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.outcome is not None:
            return
        for place in self.places.living() if now >= self._due_at else ():
            patience = self._patience[place.incarnation]
            if now >= patience.until:
                why = patience.lost_why or f"it has sent nothing for {self.limits.heartbeat_s:g} s"
                self.die(place.incarnation, why, now)
        if now >= self._due_at:
            self._due_at = min((self._patience[m.incarnation].until for m in self.places.living()), default=math.inf)
        if self.outcome is None:
            self._form(now)
        if self.group is not None and not self.places.count(*MISSED):
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

    # --- who comes in ---

    def _is_of_another_job(self, who: Register) -> bool:
        """Then it is not told how this one has ended: it would take that for its own end."""
        return self.of_agents and who.run_id != self._run_id

    def _refusal(self, who: Register) -> str:
        """Why this process cannot come in, whatever the place; empty: nothing speaks against it."""
        if self._is_of_another_job(who):
            return (
                f"--rdzv-id {who.run_id}, but the job that meets here has another one: give all its nodes the "
                "same, and another job a port of its own"
            )
        if self.outcome is not None:
            return f"the job is over: {self.outcome.why or 'its training is finished'}"
        if who.job not in ("", self.job):
            if self.of_agents:
                return "the rendezvous has been started again"
            return (
                "this scheduler does not know the job that this worker is in: it was started without the table of the "
                "first one. Start it with the same MS_RECOVERY_PATH"
            )
        if self.of_agents:
            if who.node_id.isdecimal() and int(who.node_id) >= self.size:
                return f"--node-rank {who.node_id}, and --nnodes {self.size} where the nodes meet"
            return ""
        if who.size != self.size:
            return f"MS_WORKER_NUM={who.size} here and {self.size} at the scheduler; give all processes the same number"
        if who.recovery != self.recovery:
            here, there = (("1" if on else "0") for on in (who.recovery, self.recovery))
            return f"MS_ENABLE_RECOVERY={here} here and {there} at the scheduler; give all processes the same"
        return ""

    def _place_for(self, who: Register, now: float) -> Place | messages.Refused:
        """The place that a new incarnation takes; else why it gets none."""
        self.tick(now)
        if self.outcome is not None:
            return messages.Refused(self.outcome.why, over=self.outcome.code)
        place = self.places.get(who.node_id) or self._nameless_place(who, now)
        if place is not None and (until := self._held_until(place, who)) > now:
            name = "--node-rank" if self.of_agents else "MS_NODE_ID"
            why = (
                f"{name}={place.node_id} belongs to {place.said.process}, which is not known to have ended. If it "
                f"still runs, end it, or give this one another {name}"
            )
            return messages.Refused(why, wait_s=until - now)
        if self.places.count(ProcessState.DONE):
            over = next(m for m in self.places.values() if m.state is ProcessState.DONE)
            return messages.Refused(f"{over} has finished its training already: the job is at its end")
        if self.generation >= 0 and not self.recovery:
            return messages.Refused("the job runs already, and takes in no other process without MS_ENABLE_RECOVERY=1")
        if place is None and len(self.places) >= self.size and not self.of_agents:
            return messages.Refused(self._full(who))
        name = who.node_id or self._new_name(who.process.host)
        return place or Place(node_id=name, named=bool(who.node_id), said=who)

    def _held_until(self, place: Place, who: Register) -> float:
        """Until when the place is kept for the process that has it; 0: it is free for `who`."""
        if place.said.process == who.process and place.node_id == who.node_id:
            return 0.0  # it has started over
        if place.state.lives or (place.state is ProcessState.AWAY and place.node_id != who.node_id):
            return self._patience[place.incarnation].until
        return 0.0

    def _nameless_place(self, who: Register, now: float) -> Place | None:
        """A free place of a process without a node id, for one that has no place, on its machine first."""
        if len(self.places) == self.places.num_living:
            return None
        found = [m for m in self.places.values() if not m.named and self._held_until(m, who) <= now]
        return min(found, key=lambda m: (m.said.process.host != who.process.host, _natural(m.node_id)), default=None)

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

    def _welcome(self, place: Place) -> messages.Welcome:
        return messages.Welcome(self.job, place.node_id, self.limits.heartbeat_s)

    # --- how it goes on ---

    def _go_on(self, now: float) -> None:
        self._settle()
        if self.outcome is None:
            self._form(now)
            self._tell_news()

    def _form(self, now: float) -> None:
        """Form the next group, when no member of the last one trains and enough wait, all connected."""
        num_waiting = self.places.count(ProcessState.WAITING)
        if num_waiting < self.least:
            self._form_at = math.inf
            return
        if self.places.count(*IN_GROUP):
            return
        self._form_at = min(self._form_at, now + self.limits.last_call_s)
        if num_waiting < self.size and now < self._form_at:
            return
        waiting = self.places.waiting()
        if any(self._patience[m.incarnation].lost_why for m in waiting):
            return
        self._number(waiting)
        self.places = Places(waiting)
        members = self.places.members()
        self.group = _Formed(self.generation + 1, members[0].said.store)
        self._waiting_since, self._form_at = None, math.inf
        for place in members:
            self._move(place, ProcessState.TRAINING)
        self._groups = self._group_messages()
        self._paces, self._slow = {}, ()
        self._told = self._topics()
        self.outbox += self._groups.items()

    def _number(self, waiting: list[Place]) -> None:
        """A member keeps its number, an integer node id is its own; the others follow in natural order."""
        chosen = sorted(waiting, key=lambda m: m.rank is None)[: self.size]
        chosen.sort(key=lambda m: (m.rank is None, _natural(m.node_id)))
        wanted = [m.node_id if m.rank is None else str(m.rank) for m in chosen]
        for place in waiting:
            place.rank = None
        free = {str(number): number for number in range(len(chosen))}
        for place, number in zip(chosen, wanted, strict=True):
            place.rank = free.pop(number, None)
        for place, rank in zip([m for m in chosen if m.rank is None], free.values(), strict=True):
            place.rank = rank

    def _group_messages(self) -> dict[str, messages.Group]:
        """What each member needs to enter the group that was formed last, by its incarnation."""
        assert self.group is not None
        members = self.places.members()
        host, port = self.group.store
        size, restarts = sum(m.said.ranks for m in members), max(m.said.restarts for m in members)
        role_sizes, local_sizes = Counter[str](), Counter(place.machine for place in members)
        for place in members:
            role_sizes[place.said.role] += place.said.ranks
        found: dict[str, messages.Group] = {}
        rank, role_ranks, local_ranks = 0, Counter[str](), Counter[str]()
        for place in members:
            machine, role = place.machine, place.said.role
            found[place.incarnation] = messages.Group(
                generation=self.group.generation,
                node=place.rank or 0,
                nodes=len(members),
                rank=rank,
                size=size,
                role_rank=role_ranks[role],
                role_size=role_sizes[role],
                local_rank=local_ranks[machine],
                local_size=local_sizes[machine],
                restarts=restarts,
                host=host,
                port=port,
            )
            rank += place.said.ranks
            role_ranks[role] += place.said.ranks
            local_ranks[machine] += 1
        return found

    def _news(self) -> messages.News:
        members = self.places.members()
        num_waiting = self.places.count(ProcessState.WAITING)
        room = self.size - sum(m.state.is_in_group for m in members)
        missing = sorted((m for m in members if m.state.is_missed), key=lambda m: m.state is not ProcessState.DEAD)
        why = ""
        if missing:
            how = "is dead" if missing[0].state is ProcessState.DEAD else "has left the group"
            why = f"{missing[0]} {how}: {missing[0].why}".removesuffix(": ")
        ranks = tuple(m.rank or 0 for m in missing[:_MOST_TOLD])
        failed = bool(missing and missing[0].why)
        return messages.News(min(num_waiting, room), ranks, why, failed)

    def _topics(self) -> tuple[bool, bool, int]:
        """News are told when this changes: not with each member that comes or goes, for most go together."""
        is_missing = self.places.count(*MISSED, numbered=True) > 0
        has_room = self.places.count(*IN_GROUP) < self.size
        return (
            has_room and self.places.count(ProcessState.WAITING) > 0,
            is_missing,
            self.places.count(ProcessState.DEAD),
        )

    def _tell_news(self) -> None:
        if self.group is None:
            return
        told, self._told = self._told, self._topics()
        if told != self._told:
            news = self._news()
            for place in self.places.members():
                if place.state.is_in_group:
                    self.outbox.append((place.incarnation, news))

    def _settle(self) -> None:
        """Conclude when no process is left that could go on, and none is waited for."""
        if self.outcome is not None or self.generation < 0:
            return
        if self.places.count(ProcessState.TRAINING) or not self.places.count(*_OVER):
            return  # as far as its members are concerned
        places = self.places.members()
        states = {m.state for m in places}
        if states & {ProcessState.WAITING, ProcessState.TRAINING}:
            # New processes for dead ones wait for a group that a finished rank will never be in.
            is_over = ProcessState.DONE in states and not states & {ProcessState.AWAY, ProcessState.TRAINING}
            if self._lost_why and is_over:
                self.fail(f"{self._lost_why}; the other ranks have finished")
            return
        left = [m for m in places if m.state is ProcessState.LEFT]
        if states <= {ProcessState.DONE, ProcessState.ENDED}:
            self._end(JobOutcome(0))
        elif left:
            codes = [m for m in left if m.code] or left
            why = f"{codes[0]} has left with exit code {codes[0].code}: {codes[0].why}"
            self._end(JobOutcome(codes[0].code, why))
        elif ProcessState.DONE in states:
            self._end(JobOutcome(EXIT_ERROR, f"{self._lost_why}; the other ranks have finished"))
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
        table.places = Places(found.places)
        table.group, table._lost_why, table.outcome = found.group, found.lost_why, found.outcome
        for each in found.places:
            if each.state.lives:
                why = f"it has not connected again within {limits.heartbeat_s:g} s"
                table._patience[each.incarnation] = _Patience(each, now + limits.heartbeat_s, why)
                table._due_at = now
            elif each.state is ProcessState.AWAY:
                table._patience[each.incarnation] = _Patience(each, now + _AWAY_S)
        ranks = [m.rank for m in found.places if m.rank is not None]
        if len(set(ranks)) != len(ranks) or any(rank >= table.size for rank in ranks):
            raise ValueError("two node ids have one rank, or a rank is outside of the job")
        if len(table.places) != len(found.places) or len(table.places) > table.size:
            raise ValueError("a node id is there twice, or there are more of them than ranks")
        if table.group is not None and len(ranks) != table.size:
            raise ValueError("a group was formed, and a rank has no node id")
        table._groups = table._group_messages() if table.group is not None else {}
        return table


def _natural(text: str) -> list[Any]:
    """Sorts ``worker-2`` before ``worker-10``."""
    parts = _NUMBERS.split(text)
    return [(int(part), "") if number % 2 else (0, part) for number, part in enumerate(parts)]
