"""The rules of a recovery in place: whatever dies, reports, refuses or stays silent, in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.core.moment import Moment
from mindx_elastic.rejoin.protocol import Coordinator, Fallback, InMemory, Phase, Report, decide

RANKS = 5


def report(rank: int, step: int = 7, **more: Any) -> Report:
    facts: dict[str, Any] = {"run_id": "run", "attempt": 3, "clean": True, "groups": "g"}
    return Report(rank=rank, step=step, **{**facts, **more})


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, Report | None]:
    """What each rank of a world has come to: steps that differ by at most one, torn updates, refusals."""
    size, step = draw(st.integers(2, RANKS)), draw(st.integers(0, 3))
    found: dict[int, Report | None] = {}
    for rank in range(size):
        found[rank] = None
        if draw(st.integers(0, 3)):
            found[rank] = report(
                rank,
                step + draw(st.integers(0, 1)),
                clean=draw(st.integers(0, 3)) > 0,
                groups=draw(st.sampled_from("gggggh")),
                attempt=draw(st.sampled_from([3, 3, 3, 3, 4])),
                problem=draw(st.sampled_from(["", "", "", "", "no"])),
            )
    return found


@given(worlds())
def test_all_go_on_from_the_most_advanced_boundary_that_some_rank_is_whole_at(
    reports: dict[int, Report | None],
) -> None:
    alive = [each for each in reports.values() if each is not None]
    verdict = decide(reports, world_size=len(reports))
    if verdict.refusal:
        assert verdict == type(verdict)(refusal=verdict.refusal)
        return
    assert verdict.dead == tuple(rank for rank, each in reports.items() if each is None)
    assert verdict.dead
    donor = reports[verdict.donor]
    assert donor is not None
    assert donor.clean
    assert donor.step == verdict.step >= 1
    assert all(each.step <= verdict.step for each in alive), "no survivor's step may be lost"
    for each in alive:
        holds_it = each.clean and each.step == verdict.step
        assert (each.rank in verdict.behind) == (not holds_it)
    assert set(verdict.needy) == {*verdict.dead, *verdict.behind}
    assert verdict.donor not in verdict.needy
    assert len({(each.run_id, each.attempt, each.groups, each.problem) for each in alive}) == 1


@given(worlds())
def test_there_is_a_verdict_whenever_a_whole_rank_is_furthest(reports: dict[int, Report | None]) -> None:
    """A refusal costs a restart, so it must have its reason."""
    alive = [each for each in reports.values() if each is not None]
    clean = [each.step for each in alive if each.clean]
    expected = (
        0 < len(alive) < len(reports)
        and bool(clean)
        and max(clean) == max(each.step for each in alive) >= 1
        and len({(each.attempt, each.groups) for each in alive}) == 1
        and not any(each.problem for each in alive)
    )
    assert (not decide(reports, world_size=len(reports)).refusal) == expected


@given(worlds(), st.randoms())
def test_the_order_of_the_reports_does_not_matter(reports: dict[int, Report | None], random: Any) -> None:
    mixed = list(reports.items())
    random.shuffle(mixed)
    assert decide(dict(mixed), world_size=len(reports)) == decide(reports, world_size=len(reports))


@given(worlds())
def test_a_report_is_the_same_after_it_has_been_written_and_read(reports: dict[int, Report | None]) -> None:
    for rank, each in reports.items():
        if each is not None:
            assert Report.from_json(rank, json.loads(json.dumps(each.to_json()))) == each


Sharded = tuple[dict[int, Report | None], dict[int, InMemory]]


@st.composite
def sharded_worlds(draw: st.DrawFn) -> Sharded:
    """Ranks that hold parts: each its own, pairs the same, or all the same; with some snapshots in memory."""
    size, step = draw(st.integers(2, RANKS)), draw(st.integers(1, 4))
    replicas = draw(st.sampled_from(["none", "pairs", "all"]))
    base = draw(st.sampled_from([None, ("run", 2, 3)]))
    moments: list[Moment] = [("run", 3, number) for number in range(1, 6)]
    moments += [("run", 2, 3), ("run", 2, 4), ("other", 3, 4)]
    reports: dict[int, Report | None] = {}
    memory: dict[int, InMemory] = {}
    for rank in range(size):
        snapshots = draw(st.lists(st.sampled_from(moments), max_size=3, unique=True))
        boundaries = draw(st.lists(st.sampled_from(moments), max_size=4, unique=True))
        memory[rank] = InMemory(tuple(snapshots), tuple(boundaries), draw(st.integers(-1, 5)))
        reports[rank] = None
        if draw(st.integers(0, 3)):
            peers = {"none": (rank,), "pairs": (rank - rank % 2, rank - rank % 2 + 1), "all": None}[replicas]
            reports[rank] = report(
                rank,
                step + draw(st.integers(0, 1)),
                clean=draw(st.integers(0, 3)) > 0,
                peers=peers,
                base=base,
                saved=draw(st.sampled_from([0, 0, 2, 4])),
                memory=memory[rank],
            )
    return reports, {rank: memory[rank] for rank, each in reports.items() if each is None}


def find_in_memory(reports: Mapping[int, Report | None], dead: Mapping[int, InMemory]) -> Moment | None:
    """The newest boundary that every rank can go back to, worked out in another way."""
    alive = [each for each in reports.values() if each is not None]
    memory = {rank: dead[rank] if each is None else each.memory for rank, each in reports.items()}

    def alike(one: int, other: int) -> bool:
        named = [set(reports) if each.peers is None else {each.rank, *each.peers} for each in alive]
        return any({one, other} <= each for each in named)

    def can(rank: int, moment: Moment) -> bool:
        if moment in memory[rank].snapshots:
            return True
        others = [other for other in memory if moment in memory[other].snapshots]
        return moment in memory[rank].boundaries and any(alike(rank, other) for other in others)

    wanted = {("run", 3, step) for step in range(1, 9)} | ({alive[0].base} if alive[0].base else set())
    saved = min(each.saved for each in alive)
    good = [moment for moment in wanted if moment[2] >= saved and all(can(rank, moment) for rank in reports)]
    return max(good, default=None)


@given(sharded_worlds())
def test_ranks_with_parts_take_them_from_the_living_or_all_go_back_to_memory(world: Sharded) -> None:
    reports, dead = world
    alive = [each for each in reports.values() if each is not None]
    verdict = decide(reports, world_size=len(reports), dead_memory=dead)
    if not alive or not dead:
        assert verdict.refusal
        return
    from_living = decide(reports, world_size=len(reports), dead_memory={rank: InMemory() for rank in dead})
    if verdict.refusal:
        assert find_in_memory(reports, dead) is None
    elif verdict.rewinds:
        moment = (verdict.run_id, verdict.attempt, verdict.step)
        assert moment == find_in_memory(reports, dead)
        assert verdict.needy == tuple(range(len(reports))), "no rank keeps a state of its own"
        assert verdict.behind == tuple(each.rank for each in alive)
        assert reports[verdict.donor] is not None
        passed = [each.step for each in alive] + [each.step for each in dead.values() if each.step >= 0]
        assert verdict.steps_lost == max(0, min(passed) - verdict.step)
        assert not verdict.donors
        for rank, source in verdict.sources.items():
            one = reports[source]
            assert moment in (dead[source] if one is None else one.memory).snapshots
            assert (
                source == rank or moment in (dead[rank] if (mine := reports[rank]) is None else mine.memory).boundaries
            )
    else:
        assert verdict == from_living or from_living.rewinds, "what is in memory does not matter"
        assert verdict.step == max(each.step for each in alive)
        assert verdict.steps_lost == 0
        assert verdict.donor in verdict.donors
        for rank, source in verdict.sources.items():
            holder = reports[source]
            assert holder is not None
            assert holder.clean
            assert holder.step == verdict.step
            assert holder.peers is None or rank in holder.peers
        for each in alive:
            assert each.rank in verdict.sources or (each.clean and each.step == verdict.step)
    if not verdict.refusal:
        assert verdict.next_attempt == 4, "above that of all"


@given(sharded_worlds(), st.randoms())
def test_the_order_does_not_matter_with_parts_either(world: Sharded, random: Any) -> None:
    reports, dead = world
    mixed, others = list(reports.items()), list(dead.items())
    random.shuffle(mixed)
    random.shuffle(others)
    one = decide(dict(mixed), world_size=len(reports), dead_memory=dict(others))
    assert one == decide(reports, world_size=len(reports), dead_memory=dead)


@given(sharded_worlds())
def test_what_is_in_memory_is_the_same_after_it_has_been_written_and_read(world: Sharded) -> None:
    reports, dead = world
    for rank, each in reports.items():
        if each is not None:
            assert Report.from_json(rank, json.loads(json.dumps(each.to_json()))) == each
    for memory in dead.values():
        assert InMemory.from_json({"dead": True, **json.loads(json.dumps(memory.to_json()))}) == memory
    assert InMemory.from_json({"dead": True}) == InMemory()


def test_a_torn_survivor_of_two_goes_back_to_the_snapshot_of_the_dead_one() -> None:
    """Replicas: one rank of the machine takes the snapshots, the others keep what is their own."""
    moment = ("run", 3, 7)
    torn = report(1, clean=False, memory=InMemory((), (moment,)))
    verdict = decide({0: None, 1: torn}, world_size=2, dead_memory={0: InMemory((moment,), (moment,))})
    assert (verdict.rewinds, verdict.step, verdict.sources, verdict.steps_lost) == (True, 7, {0: 0, 1: 0}, 0)


def test_a_step_that_every_rank_had_passed_counts_as_lost() -> None:
    seven, eight = ("run", 3, 7), ("run", 3, 8)
    alive = report(0, 8, peers=(0,), memory=InMemory((eight, seven)))
    verdict = decide({0: alive, 1: None}, world_size=2, dead_memory={1: InMemory((seven,), (), 7)})
    assert (verdict.rewinds, verdict.step, verdict.steps_lost) == (True, 7, 0), "the dead rank had not passed step 8"
    verdict = decide({0: alive, 1: None}, world_size=2, dead_memory={1: InMemory((seven,), (), 8)})
    assert (verdict.rewinds, verdict.step, verdict.steps_lost) == (True, 7, 1)
    assert "--snapshot-every" in decide({0: alive, 1: None}, world_size=2).refusal


def test_no_rank_goes_back_further_than_a_restart_would() -> None:
    old = ("run", 3, 5)
    alive = report(0, 9, peers=(0,), saved=6, memory=InMemory((old,)))
    assert "on disk" in decide({0: alive, 1: None}, world_size=2, dead_memory={1: InMemory((old,))}).refusal


def test_a_dead_rank_takes_its_part_from_its_replica() -> None:
    """Two replicas of two parts: rank 3 has what rank 1 has."""
    reports = {rank: report(rank, peers=(rank % 2, rank % 2 + 2)) for rank in range(4)}
    verdict = decide({**reports, 1: None}, world_size=4)
    assert (verdict.sources, verdict.donors, verdict.donor, verdict.rewinds) == ({1: 3}, (0, 2, 3), 0, False)
    verdict = decide({**reports, 0: None, 1: None}, world_size=4)
    assert (verdict.sources, verdict.donors, verdict.donor) == ({0: 2, 1: 3}, (2, 3), 2)
    assert "part of the state that rank 1 had" in decide({**reports, 1: None, 3: None}, world_size=4).refusal


@pytest.mark.parametrize(
    "change",
    [
        {"memory": {"snapshots": [["run", 3]]}},
        {"memory": {"snapshots": [["run", 3, -1]]}},
        {"base": ["run", "x", 2]},
        {"peers": 3},
        {"memory": None},
    ],
)
def test_a_report_that_makes_no_sense_of_memory_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Report.from_json(1, {**report(1).to_json(), **change})


@pytest.mark.parametrize(
    "change",
    [{"step": -1}, {"attempt": 1 << 61}, {"step": "seven"}, {"orders": 3}, {"orders": {"m": ["x"]}}, {"step": None}],
)
def test_what_is_no_report_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Report.from_json(1, {**report(1).to_json(), **change})


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ({0: report(0), 1: report(1)}, "none is dead"),
        ({0: None, 1: None}, "no rank is left"),
        ({0: report(0, problem="the ranks hold different parts"), 1: None}, "rank 0: the ranks hold different parts"),
        ({0: report(0), 1: report(1, attempt=4), 2: None}, "different attempts"),
        ({0: report(0), 1: report(1, groups="h"), 2: None}, "different process groups"),
        ({0: report(0, clean=False), 1: None}, "rank 0 was cut off in an update: none has"),
        ({0: report(0, clean=False), 1: None, 2: report(2, clean=False)}, "ranks 0, 2 were all cut off in an update"),
        ({0: report(0, 7), 1: report(1, 8, clean=False), 2: None}, "furthest was cut off"),
        ({0: report(0, 0), 1: None}, "too early"),
    ],
)
def test_a_refusal_says_why(reports: dict[int, Report | None], words: str) -> None:
    assert words in decide(reports, world_size=len(reports)).refusal


def test_a_survivor_that_is_behind_takes_the_state_of_one_that_is_not() -> None:
    verdict = decide({0: report(0, 8), 1: report(1, 7), 2: None, 3: report(3, 7, clean=False)}, world_size=4)
    assert (verdict.step, verdict.donor, verdict.dead, verdict.behind) == (8, 0, (2,), (1, 3))
    assert verdict.needy == (1, 2, 3)


EVENTS = st.tuples(
    st.sampled_from(
        ["die", "die", "report", "report", "report", "report", "torn", "problem", "state", "ready", "ready", "refuse"]
    ),
    st.integers(0, RANKS - 1),
)


def play(machine: Coordinator, name: str, rank: int) -> None:
    if name == "die":
        machine.note_death(rank)
    elif name in ("report", "torn", "problem"):
        machine.note_report(report(rank, clean=name != "torn", problem="no" if name == "problem" else ""))
    elif name == "state":
        machine.note_state()
    elif name == "ready":
        machine.note_ready(rank)
    else:
        machine.note_refusal("time is up")


@given(st.integers(2, RANKS), st.data())
def test_whatever_happens_a_recovery_succeeds_with_all_or_falls_back_with_a_reason(
    size: int, data: st.DataObject
) -> None:
    machine = Coordinator(size)
    dead = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size))
    machine.begin(dead)
    is_over = False
    for name, rank in data.draw(st.lists(EVENTS, max_size=40)):
        if rank >= size:
            continue
        before = (machine.phase, machine.verdict, machine.has_state, machine.reason, machine.fallback)
        play(machine, name, rank)
        if is_over:
            assert (machine.phase, machine.verdict, machine.has_state, machine.reason, machine.fallback) == before
        if before[1] is not None:
            assert machine.verdict == before[1], "a verdict is final"
        is_over = machine.phase in (Phase.RUN, Phase.FALLBACK)
        if machine.phase is Phase.RUN:
            assert machine.has_state
            assert machine.ready == set(range(size))
            assert machine.verdict is not None
            assert not machine.verdict.refusal
        elif machine.phase is Phase.FALLBACK:
            assert machine.reason
            assert machine.fallback is (Fallback.KILL if machine.has_state else Fallback.SAVE)
        else:
            assert machine.missing, "what it waits for can be named"
        if machine.phase is Phase.AGREED:
            assert machine.verdict is not None
            assert not machine.verdict.refusal


@given(st.integers(2, RANKS), st.data())
def test_it_succeeds_where_nothing_more_happens(size: int, data: st.DataObject) -> None:
    """Deaths before a rank's own report only make more places to fill; some rank has to be left."""
    machine = Coordinator(size)
    for generation in range(1, data.draw(st.integers(1, 3)) + 1):
        order = data.draw(st.permutations(range(size)))
        number = data.draw(st.integers(1, size - 1))
        first, later, alive = order[:1], order[1:number], order[number:]
        machine.begin(first)
        assert machine.generation == generation
        for rank in data.draw(st.permutations([*later, *alive])):
            play(machine, "die" if rank in later else "report", rank)
        assert machine.phase is Phase.AGREED, machine.reason
        assert machine.verdict is not None
        assert set(machine.verdict.dead) == {*first, *later}
        for name, rank in data.draw(st.permutations([("state", 0), *(("ready", each) for each in range(size))])):
            assert machine.missing
            play(machine, name, rank)
        assert not machine.missing
        machine.note_refusal("too late")
        assert not machine.reason


@given(st.integers(2, RANKS), st.data())
def test_any_death_after_the_verdict_ends_it(size: int, data: st.DataObject) -> None:
    """Also that of a new process, before and after it was ready."""
    machine = Coordinator(size)
    machine.begin([0])
    for rank in range(1, size):
        machine.note_report(report(rank))
    has_state = data.draw(st.booleans())
    if has_state:
        machine.note_state()
    for rank in data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1)):
        machine.note_ready(rank)
    victim = data.draw(st.integers(0, size - 1))
    machine.note_death(victim)
    assert machine.phase is Phase.FALLBACK
    assert f"rank {victim} has died" in machine.reason
    assert machine.fallback is (Fallback.KILL if has_state else Fallback.SAVE)


def test_the_new_process_may_die_before_the_verdict() -> None:
    machine = Coordinator(3)
    machine.begin([1])
    machine.note_death(1)
    assert machine.phase is Phase.FALLBACK
    assert machine.reason == "the new process of rank 1 has died"


def test_a_generation_begins_only_while_all_train() -> None:
    machine = Coordinator(3)
    machine.begin([1])
    with pytest.raises(ValueError, match="under way"):
        machine.begin([2])
