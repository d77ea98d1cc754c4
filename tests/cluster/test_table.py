"""The scheduler's table: who gets which rank, who is refused, what a scheduler that is started again knows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mindx_elastic.cluster.messages import (
    Dead,
    Farewell,
    Group,
    Identity,
    Message,
    Register,
    Welcome,
    as_json,
)
from mindx_elastic.cluster.table import Limits, ProcessState, Table
from mindx_elastic.core.fields import read

LIMITS = Limits(heartbeat_s=5.0, reconnect_s=1.0, formation_s=100.0)
HERE, THERE = "boot/pid:[1]", "other boot/pid:[1]"


def who(number: int, node_id: str = "", *, space: str = HERE, host: str = "h", **more: Any) -> Register:
    """A process; `number` names it."""
    fields: dict[str, Any] = {"size": 2, "recovery": True, "store": ("h", 1000 + number)}
    return Register(
        process=Identity(host=host, pid=number, started=str(number), space=space),
        node_id=node_id,
        incarnation=f"{number:032d}",
        **{**fields, **more},
    )


def new_table(size: int = 2, *, recovery: bool = True) -> Table:
    return Table(size, job="job", recovery=recovery, limits=LIMITS, now=0.0)


def form(table: Table, processes: list[Register], now: float = 0.0) -> None:
    """All register."""
    for each in processes:
        assert answer(table, each, now)["op"] == "welcome"


def answer(table: Table, who: Register, now: float) -> dict[str, Any]:
    """What the process is told."""
    return as_json(table.register(who, now))


def told(table: Table, op: str) -> list[tuple[int, dict[str, Any]]]:
    """(process, message) of this kind, and empties the outbox."""
    found = [(int(tell.incarnation), as_json(tell.message)) for tell in table.outbox]
    table.outbox.clear()
    return [each for each in found if each[1]["op"] == op]


# --- ranks ---


@pytest.mark.parametrize(
    ("ids", "ranks"),
    [
        (["0", "1", "2"], [0, 1, 2]),
        (["2", "1", "0"], [2, 1, 0]),
        (["worker-10", "worker-9", "a"], [2, 1, 0]),
        (["x", "1", "a"], [2, 1, 0]),  # a number is the rank, the others take what is left
        (["7", "8", "9"], [0, 1, 2]),  # numbers that are no ranks
        (["00", "0", "1"], [2, 0, 1]),
    ],
)
def test_a_number_is_the_rank_and_names_follow_in_their_order(ids: list[str], ranks: list[int]) -> None:
    table = new_table(3)
    form(table, [who(number, name, size=3) for number, name in enumerate(ids)])
    assert [message["rank"] for _, message in sorted(told(table, "group"))] == ranks


def test_workers_without_an_id_are_named_by_machine_and_order() -> None:
    table = new_table(3)
    form(table, [who(1, size=3), who(2, host="g", size=3), who(3, size=3)])
    assert sorted(table.places) == ["g-0", "h-0", "h-1"]
    table.die(f"{3:032d}", "killed", 1.0)
    assert answer(table, who(4, size=3), 1.0)["node_id"] == "h-1"


# --- who is refused ---


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (who(3, "2"), "one too many"),
        (who(3), "one too many"),
        (who(3, "1", size=3), "MS_WORKER_NUM=3 here and 2 at the scheduler"),
        (who(3, "1", recovery=False), "MS_ENABLE_RECOVERY=0 here and 1"),
        (who(3, "1", job="another"), "does not know the job"),
    ],
)
def test_processes_that_do_not_fit_are_refused_with_the_reason(process: Register, why: str) -> None:
    table = new_table()
    form(table, [who(1, "0"), who(2, "1")])
    told = answer(table, process, 1.0)
    assert told["op"] == "refused" and why in told["why"]


def test_the_place_of_a_process_that_begins_anew_is_kept_for_it() -> None:
    table = new_table()
    form(table, [who(1), who(2)])
    table.die(f"{2:032d}", "killed", 1.0)
    table.leave(f"{1:032d}", Farewell("away", 75, "rank 1 is dead"), 1.0)
    assert answer(table, who(3), 1.1)["node_id"] == "h-1"
    assert answer(table, who(4), 1.1)["op"] == "refused"
    assert answer(table, replace(who(1), incarnation=f"{9:032d}"), 9.0)["node_id"] == "h-0"


# --- deaths ---


def test_the_others_are_told_of_a_death_and_meet_in_the_next_generation() -> None:
    table = new_table(3)
    form(table, [who(n, str(n), size=3) for n in range(3)])
    table.outbox.clear()
    table.die(f"{1:032d}", "killed", 1.0)
    assert [(process, m["rank"]) for process, m in told(table, "death")] == [(0, 1), (2, 1)]
    table.register(who(7, "1", size=3), 2.0)
    for survivor in (2, 0):
        assert not table.outbox  # not all have begun anew
        table.leave(f"{survivor:032d}", Farewell("away", 75, "rank 1 is dead"), 2.0)
        table.register(replace(who(10 + survivor, str(survivor), size=3), process=who(survivor).process), 2.0)
    found = told(table, "group")
    assert {m["port"] for _, m in found} == {1010}, "of rank 0"
    assert [(process, m["rank"], m["generation"]) for process, m in found] == [(10, 0, 1), (7, 1, 1), (12, 2, 1)]


def test_a_rank_that_finishes_while_a_new_process_waits_for_it_ends_the_job_with_the_reason() -> None:
    """It will be in no group any more, and it is not missing."""
    table = new_table()
    form(table, [who(0, "0"), who(1, "1")])
    table.die(f"{1:032d}", "killed", 1.0)
    table.register(who(7, "1"), 2.0)
    table.outbox.clear()
    table.leave(f"{0:032d}", Farewell("done", 0, ""), 3.0)
    assert table.outcome is not None and table.outcome.code == 1
    assert table.outcome.why.endswith("is dead: killed; the other ranks have finished")
    assert [process for process, _ in told(table, "fail")] == [7]


def test_without_recovery_a_death_ends_the_job_with_the_reason() -> None:
    table = new_table(recovery=False)
    form(table, [who(0, "a", recovery=False), who(1, "b", recovery=False)])
    table.outbox.clear()
    table.die(f"{1:032d}", "its process is gone", 1.0)
    assert table.outcome is not None and table.outcome.code == 1
    assert table.outcome.why.startswith("rank 1 (node id b, process 1 on h) is dead: its process is gone")
    assert [(process, m["rank"]) for process, m in told(table, "fail")] == [(0, 1)]


def test_workers_that_never_come_are_counted() -> None:
    table = new_table()
    table.register(who(1, "0"), 0.0)
    for second in range(1, 100):
        table.hear(f"{1:032d}", float(second))
        table.tick(float(second))
    table.hear(f"{1:032d}", 100.0)
    table.tick(100.0)
    assert table.outcome is not None
    assert "only 1 of 2 workers have registered within 100 s" in table.outcome.why
    assert "1 that never registered" in table.outcome.why


# --- the end ---


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([("done", 0), ("done", 0)], 0),
        ([("left", 143), ("left", 143)], 143),
        ([("left", 0), ("left", 0)], 0),
        ([("done", 0), ("failed", 1)], 1),
        ([("left", 143), ("failed", 1)], 143),
    ],
)
def test_the_outcome_tells_how_the_workers_have_ended(ends: list[tuple[str, int]], code: int) -> None:
    table = new_table()
    form(table, [who(0, "0"), who(1, "1")])
    for number, (how, each) in enumerate(ends):
        table.leave(f"{number:032d}", read(Farewell, {"how": how, "code": each, "why": ""}), 1.0)
    assert table.outcome is not None and table.outcome.code == code


# --- on disk ---


def test_damaged_tables_are_refused() -> None:
    table = new_table()
    form(table, [who(0, "0"), who(1, "1")])
    good = table.to_json()
    for key, value in [("schema", 9), ("size", 0), ("places", "x"), ("group", {}), ("job", 3)]:
        with pytest.raises(ValueError, match=r"."):
            Table.from_json({**good, key: value}, recovery=True, limits=LIMITS, now=0.0)
    twice = [{**each, "rank": 0} for each in good["places"]]
    with pytest.raises(ValueError, match="one rank"):
        Table.from_json({**good, "places": twice}, recovery=True, limits=LIMITS, now=0.0)


# --- properties ---


@dataclass
class Process:
    """A worker as it is, whatever the scheduler believes."""

    who: Register
    alive: bool = True
    silent_since: float | None = None
    admitted: bool = False
    rank: int | None = None
    node_id: str = ""
    heard_at: float = 0.0
    told_dead: bool = False


class Cluster(RuleBasedStateMachine):
    """Workers and a scheduler that is killed at any moment: after a write to its disk, and before it has told of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.count = 0.0, 0
        self.processes: list[Process] = []
        self.ranks: dict[str, int] = {}

    @initialize(size=st.integers(1, 4), data=st.data())
    def begin(self, size: int, data: st.DataObject) -> None:
        self.size = size
        names = ["0", "1", "2", "3", "w-10", "w-2", "x", ""]
        self.names = data.draw(st.lists(st.sampled_from(names), min_size=size, max_size=size))
        self.table = Table(size, job="job", recovery=True, limits=LIMITS, now=0.0)
        self.disk = ""
        self.write_and_tell()

    # --- the scheduler ---

    def write_and_tell(self, *, tell: bool = True) -> None:
        if self.table.changed:
            self.disk = json.dumps(self.table.to_json())
            self.table.changed = False
        if not tell:
            return
        while self.table.outbox:
            each = self.table.outbox.pop(0)
            for process in self.processes:
                if process.who.incarnation == each.incarnation and process.alive and process.silent_since is None:
                    self.hear(process, each.message)

    def hear(self, process: Process, message: Message) -> None:
        if isinstance(message, Group):
            assert process.rank in (None, message.rank)
            process.rank = message.rank
            assert self.ranks.setdefault(process.node_id, process.rank) == process.rank, "a rank is for good"
            assert len(set(self.ranks.values())) == len(self.ranks)

    @rule(told=st.booleans())
    def kill_scheduler(self, told: bool) -> None:
        """Its table is what it has written last; what it has not told is lost."""
        self.write_and_tell(tell=told)
        self.table = Table.from_json(json.loads(self.disk), recovery=True, limits=LIMITS, now=self.now)
        for process in self.processes:
            if process.admitted and process.alive and process.silent_since is None and not process.told_dead:
                self.connect(process)
        self.write_and_tell()

    # --- workers ---

    def connect(self, process: Process) -> None:
        registration = replace(
            process.who,
            node_id=process.node_id or process.who.node_id,
            job="job" if process.admitted else "",
        )
        before = {m.node_id: m for m in self.table.living()}
        answer = self.table.register(registration, self.now)
        if isinstance(answer, Welcome):
            self.check_owner(process, answer.node_id, before)
            process.admitted, process.node_id, process.heard_at = True, answer.node_id, self.now
        elif isinstance(answer, Dead):
            process.told_dead = True

    def check_owner(self, process: Process, node_id: str, before: dict[str, Any]) -> None:
        for other in self.processes:
            if other is process or other.node_id != node_id or not other.alive or other.told_dead:
                continue
            held = before.get(node_id)
            if held is not None and held.incarnation == other.who.incarnation:
                raise AssertionError(f"{node_id} has a living owner, and another process was admitted")
            silent = other.silent_since is not None
            assert silent, "an owner that is heard has lost its place"
            assert self.now - (other.silent_since or 0.0) >= LIMITS.reconnect_s

    @rule(slot=st.integers(0, 3))
    def start_worker(self, slot: int) -> None:
        self.count += 1
        name = self.names[slot % self.size]
        process = Process(who(self.count, name, size=self.size))
        self.processes.append(process)
        self.connect(process)
        self.write_and_tell()
        if not process.admitted:
            process.alive = False  # it waits or ends

    @precondition(lambda self: any(p.alive and p.admitted for p in self.processes))
    @rule(data=st.data(), seen=st.booleans())
    def kill_worker(self, data: st.DataObject, seen: bool) -> None:
        process = data.draw(st.sampled_from([p for p in self.processes if p.alive and p.admitted]))
        process.alive = False
        if seen:
            self.table.die(process.who.incarnation, "its process is gone", self.now)
        else:
            self.table.lose(process.who.incarnation, self.now)
        self.write_and_tell()

    @precondition(lambda self: any(p.alive and p.admitted and p.silent_since is None for p in self.processes))
    @rule(data=st.data())
    def stop_worker(self, data: st.DataObject) -> None:
        """SIGSTOP: it is silent, and its connection stays."""
        running = [p for p in self.processes if p.alive and p.admitted and p.silent_since is None]
        data.draw(st.sampled_from(running)).silent_since = self.now

    @precondition(lambda self: any(p.alive and p.admitted and p.silent_since is None for p in self.processes))
    @rule(data=st.data(), at_once=st.booleans())
    def begin_anew(self, data: st.DataObject, at_once: bool) -> None:
        """With exec: the same process with another incarnation."""
        running = [p for p in self.processes if p.alive and p.admitted and p.silent_since is None and not p.told_dead]
        if not running:
            return
        process = data.draw(st.sampled_from(running))
        self.table.leave(process.who.incarnation, Farewell("away", 75, ""), self.now)
        process.alive = False
        self.count += 1
        again = Process(replace(process.who, node_id=process.node_id, incarnation=f"{self.count:032d}"))
        self.processes.append(again)
        if not at_once:
            self.let_pass(3.0)
        self.connect(again)
        if not again.admitted:
            again.alive = False
        self.write_and_tell()

    @precondition(lambda self: any(p.alive and p.silent_since is not None for p in self.processes))
    @rule(data=st.data())
    def continue_worker(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([p for p in self.processes if p.alive and p.silent_since is not None]))
        process.silent_since = None
        if not self.table.hear(process.who.incarnation, self.now):
            process.told_dead = True

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.2, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.let_pass(seconds)

    def let_pass(self, seconds: float) -> None:
        """All that are not stopped send their heartbeats meanwhile."""
        for _ in range(max(1, round(seconds / 0.5))):
            self.now += min(seconds, 0.5)
            for process in self.processes:
                if process.alive and process.admitted and process.silent_since is None and not process.told_dead:
                    process.told_dead = not self.table.hear(process.who.incarnation, self.now)
            self.table.tick(self.now)
        self.write_and_tell()

    # --- what holds at any time ---

    @invariant()
    def a_rank_has_one_place_and_a_place_one_process(self) -> None:
        if not hasattr(self, "table"):
            return
        ranks = [m.rank for m in self.table.places.values() if m.rank is not None]
        assert len(set(ranks)) == len(ranks) and all(0 <= rank < self.size for rank in ranks)
        incarnations = [m.incarnation for m in self.table.places.values()]
        assert len(set(incarnations)) == len(incarnations)
        for node_id, rank in self.ranks.items():
            assert self.table.places[node_id].rank == rank

    @invariant()
    def a_process_that_is_heard_is_never_taken_for_dead(self) -> None:
        if not hasattr(self, "table") or self.table.outcome is not None:
            return
        for process in self.processes:
            if process.alive and process.admitted and process.silent_since is None and not process.told_dead:
                member = self.table.find(process.who.incarnation)
                if member is not None:
                    assert member.state is ProcessState.LIVING


Cluster.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase
