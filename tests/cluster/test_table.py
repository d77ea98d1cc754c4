"""The scheduler's table: who gets which rank, who is refused, what a scheduler that is started again knows."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from mindx_elastic.alarm.exit_codes import EXIT_USAGE
from mindx_elastic.cluster.messages import Dead, Farewell, Identity, Refused, Register, Welcome, as_json
from mindx_elastic.cluster.table import Limits, Table
from mindx_elastic.core.fields import read
from mindx_elastic.core.pace import Pace

LIMITS = Limits(heartbeat_s=5.0, formation_s=100.0)
HERE, THERE = "boot/pid:[1]", "other boot/pid:[1]"


def who(number: int, node_id: str = "", *, space: str = HERE, host: str = "h", **more: Any) -> Register:
    """A process; `number` names it."""
    fields: dict[str, Any] = {"size": 2, "recovery": True, "store": ("h", 1000 + number)}
    return Register(
        process=Identity(host=host, pid=number, space=space),
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
    table.register(who, now)
    found = [message for incarnation, message in table.outbox if incarnation == who.incarnation]
    return as_json(next(each for each in reversed(found) if isinstance(each, Welcome | Refused | Dead)))


def told(table: Table, op: str) -> list[tuple[int, dict[str, Any]]]:
    """(process, message) of this kind, and empties the outbox."""
    found = [(int(incarnation), as_json(message)) for incarnation, message in table.outbox]
    table.outbox.clear()
    return [each for each in found if each[1]["op"] == op]


def test_an_agent_of_another_job_is_not_told_how_this_one_has_ended() -> None:
    """It would leave with the same code."""
    table = Table(1, least=1, run_id="one", job="job", recovery=True, limits=LIMITS, now=0.0)
    form(table, [who(1, size=0, run_id="one")])
    table.leave(f"{1:032d}", Farewell("done", 0, ""), 1.0)
    assert table.outcome is not None and table.outcome.code == 0
    assert answer(table, who(2, size=0, run_id="one"), 2.0)["over"] == 0
    other = answer(table, who(3, size=0, run_id="other"), 2.0)
    assert "--rdzv-id other" in other["why"] and other["over"] == EXIT_USAGE


def test_the_ranks_of_all_members_are_compared_once_all_are_known() -> None:
    table = Table(2, least=2, job="job", recovery=True, limits=LIMITS, now=0.0)
    form(table, [who(1, size=0), who(2, size=0)])
    table.tick(1.0)
    slow, fast = Pace(0, 0, 1_000, 2_000, 90_000), Pace(1, 30_000, 35_000, 40_000, 90_000)
    names = [f"{number:032d}" for number in (1, 2)]
    assert table.slow(names[0], (slow, fast), 2.0) == (), "the other node may be as slow"
    assert table.slow("of another group".ljust(32, "0"), (fast,), 4.0) == ()
    (found,) = table.slow(names[1], (replace(fast, rank=2),), 6.0)
    assert (found.rank, found.lag) == (0, 28_000)
    assert table.slow(names[1], (replace(slow, rank=2),), 6.5) == (found,), "for a second"
    assert table.slow(names[1], (replace(slow, rank=2),), 8.0) == ()


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


def test_a_place_without_a_name_is_taken_but_not_that_of_a_process_that_begins_anew() -> None:
    """Ranks stay. A named process may have lost its own place to a nameless one that was started twice."""
    for taker in ("", "x"):
        table = new_table()
        form(table, [who(1), who(2)])
        table.die(f"{2:032d}", "killed", 1.0)
        table.leave(f"{1:032d}", Farewell("away", 75, "rank 1 is dead"), 1.0)
        assert answer(table, who(3, taker), 1.1)["node_id"] == (taker or "h-1")
        assert answer(table, who(4, taker and "y"), 1.1)["op"] == "refused"
        assert answer(table, replace(who(1, "h-0"), incarnation=f"{9:032d}"), 9.0)["node_id"] == "h-0"
        assert {name: place.rank for name, place in table.places.items()} == {"h-0": 0, taker or "h-1": 1}


# --- deaths ---


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
    assert [process for process, _ in told(table, "over")] == [7]


def test_workers_that_never_come_are_counted() -> None:
    table = new_table(4)
    table.register(who(1, "0", size=4), 0.0)
    for second in range(1, 100):
        table.hear(f"{1:032d}", float(second))
        table.tick(float(second))
    table.hear(f"{1:032d}", 100.0)
    table.tick(100.0)
    assert table.outcome is not None
    assert "only 1 of 4 workers have registered within 100 s" in table.outcome.why
    assert "3 that never registered" in table.outcome.why


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


def test_what_a_scheduler_that_is_started_again_makes_of_its_table() -> None:
    """It waits for no one while a rank has finished and the others train, and does not take a killed worker for one
    that lives."""
    table = new_table()
    form(table, [who(0, "0"), who(1, "1")])
    again = Table.from_json(table.to_json(), recovery=True, limits=LIMITS, now=0.0)
    refused = answer(again, who(2, "1"), 1.0)
    assert refused["wait_s"] == pytest.approx(4.0) and "not known to have ended" in refused["why"]
    assert answer(again, who(2, "1"), 5.1)["op"] == "welcome"
    table.leave(f"{0:032d}", Farewell("done", 0, ""), 1.0)
    again = Table.from_json(table.to_json(), recovery=True, limits=LIMITS, now=0.0)
    for second in range(0, 200, 4):
        again.hear(f"{1:032d}", float(second))
        again.tick(float(second))
    assert again.outcome is None


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
    with pytest.raises(ValueError, match="schema 3 is not known"):  # of an older version, whose places are others
        Table.from_json({**good, "schema": 3, "places": [{"state": "living"}]}, recovery=True, limits=LIMITS, now=0.0)


# --- what it costs ---


@pytest.mark.parametrize("ids", [True, False])
def test_twice_the_members_take_twice_the_work(ids: bool) -> None:
    """A thousand that registered kept the scheduler busy for more than a second, and twice as many for five."""

    def work(size: int) -> int:
        processes = [who(n, str(n) * ids, size=size, host=f"h{n // 8}", space=f"s{n // 8}") for n in range(size)]
        table, steps = new_table(size), 0

        def count(*_: object) -> Any:  # a comprehension that goes through all members is a line for each of them
            nonlocal steps
            steps += 1
            return count

        sys.settrace(count)
        try:
            for each in processes:
                table.register(each, 0.0)
            for each in processes:  # connected again, as after the scheduler's death
                table.register(each, 1.0)
            table.tick(2.0)
        finally:
            sys.settrace(None)
        assert len(told(table, "group")) == 2 * size
        return steps

    assert work(400) < 2.3 * work(200)


def test_an_agent_that_comes_back_after_all_were_held_for_dead_is_missed_when_it_is_silent() -> None:
    table = Table(2, least=2, job="job", recovery=True, limits=LIMITS, now=0.0)
    agents = [who(number, str(number)) for number in range(2)]
    form(table, agents)
    table.tick(late := LIMITS.heartbeat_s + 1)
    assert table.places.num_living == 0
    form(table, [replace(each, job="job") for each in agents], late)
    assert table.places.num_living == 2
    table.tick(2 * late)
    assert table.places.num_living == 0


def test_a_member_of_a_group_that_an_older_table_does_not_know_starts_over() -> None:
    """The next group would have the number of its own, and its store: two processes would be one rank."""
    one, other = who(1), who(2)
    table = new_table()
    form(table, [one])
    lied = table.to_json()
    form(table, [other])
    assert table.generation == 0
    again = Table.from_json(lied, recovery=True, limits=LIMITS, now=1.0)
    assert answer(again, replace(one, job="job", generation=0), 1.0)["op"] == "dead"
    form(again, [who(3)], 2.0)
    assert again.generation == -1, "it waits for another process"
    form(again, [who(4)], 3.0)
    assert again.generation == 0
