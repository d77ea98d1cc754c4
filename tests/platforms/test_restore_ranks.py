"""``RESTORE_RANKS`` and its map, from groups and from plans."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.plan.facts import FileFact, ResumePlan, World, single_rank_strategy
from mindx_elastic.plan.planner import plan_resume
from mindx_elastic.platforms.restore_ranks import (
    RestoreRanks,
    parse_restore_ranks,
    parse_restore_ranks_map,
    restore_ranks,
    restore_ranks_of,
)
from tests.plan.strategies import replicated

MOMENT = ("run", 0, 9)
DDP = replicated(4, {"model.w": (8,)}, "F32")
HSDP = Strategy(4, (TensorSpec("model.w", (8,), Layout((2, 2), ("R", "S(0)")), "F32"),))  # type: ignore[arg-type]


def fact(
    rank: int,
    strategy: Strategy = DDP,
    *,
    kind: str = "breakpoint",
    moment: tuple[str, int, int] = MOMENT,
    visible_to: frozenset[int] | None = None,
) -> FileFact:
    path = f"rank_{rank}/x-{moment[1]}_{moment[2]}_{kind}.safetensors"
    return FileFact(path, rank, moment, strategy.world_size, strategy, kind, 1e9, 100, visible_to=visible_to)


def planned(facts: list[FileFact], world: World | None = None, faults: tuple[int, ...] = ()) -> ResumePlan:
    plan = plan_resume(facts, world or World(facts[0].world_size), faults=faults)
    assert isinstance(plan, ResumePlan), plan
    return plan


def test_the_documented_forms() -> None:
    found = restore_ranks([(4, 0), (1, 5)], range(8), ())
    assert (found.ranks_text, found.map_text) == ("0,1", '{"0,4": 0, "1,5": 1}')
    assert restore_ranks([(0, 4), (1, 5)], range(8), (0, 5)).ranks_text == "4,1"
    none = restore_ranks([(0, 4), (1, 5)], range(8), (1, 5))
    assert (none.ranks_text, none.map_text, none.possible) == ("-1", "{}", False)
    assert restore_ranks([(0, 4), (1, 5)], (0, 4)).ranks_text == "-1"
    assert restore_ranks([], ()).ranks_text == "-1"


@pytest.mark.parametrize("groups", [[(0, 1), (1, 2)], [()], [(-1, 0)], [(0, 0)]])
def test_groups_that_make_no_sense(groups: list[tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="replica groups"):
        restore_ranks(groups, range(9))


def test_export_lines_are_what_a_shell_reads() -> None:
    lines = restore_ranks([(0, 4), (1, 5)], range(8)).export_lines()
    assert lines[0] == "export RESTORE_RANKS=0,1"
    script = "\n".join([*lines, 'printf "%s|%s" "$RESTORE_RANKS" "$RESTORE_RANKS_MAP"'])
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == '0,1|{"0,4": 0, "1,5": 1}'


def test_a_map_that_no_environment_can_hold_is_left_out_and_said_to_be() -> None:
    lines = restore_ranks([range(40_000)], range(40_000)).export_lines()
    assert lines[0] == "export RESTORE_RANKS=0" and lines[1].startswith("# ") and lines[2].endswith("=''")
    assert all(len(line) < 131_072 for line in restore_ranks([range(16_384)], range(16_384)).export_lines())


@given(
    st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=20),
    st.integers(1, 5),
    st.sets(st.integers(0, 40)),
    st.sets(st.integers(0, 40)),
)
@settings(max_examples=60, deadline=None)
def test_donors_are_the_lowest_healthy_and_the_way_back(
    ranks: list[int], size: int, available: set[int], faults: set[int]
) -> None:
    groups = [tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)]
    found = restore_ranks(groups, available, faults)
    good = available - faults
    assert found.possible == all(good & set(group) for group in groups)
    for group, donor in found.donors.items():
        assert donor == min(good & set(group))
    assert parse_restore_ranks(found.ranks_text) == tuple(found.donors.values())
    assert parse_restore_ranks_map(found.map_text) == found.donors


@pytest.mark.parametrize("text", ["", "a", "0,,1", "0;1", "-2", "0,-1", "0,0", "1" * 9, "0,1,", "\u0663", "99999999"])
def test_malformed_ranks(text: str) -> None:
    with pytest.raises(UsageError, match="RESTORE_RANKS"):
        parse_restore_ranks(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "-1",
        '{"0,4": "0"}',
        '{"0,4": -1}',
        '{"0,4": true}',
        '{"": 0}',
        '{"0,4": 0, "4,5": 5}',
        '{"0,0": 0}',
        '{"0": 99999999}',
        "[" * 100_000,
    ],
)
def test_malformed_maps(text: str) -> None:
    with pytest.raises(UsageError, match="RESTORE_RANKS_MAP"):
        parse_restore_ranks_map(text)


# --- of plans ---


def test_replicas_share_a_donor() -> None:
    plan = planned([fact(r) for r in range(4)])
    assert restore_ranks_of(plan).map_text == '{"0,1,2,3": 0}'
    plan = planned([fact(r) for r in range(1, 4)], faults=(1,))
    assert restore_ranks_of(plan).map_text == '{"0,1,2,3": 2}'


def test_groups_of_shards() -> None:
    plan = planned([fact(r, HSDP) for r in (1, 2, 3)])
    assert restore_ranks_of(plan).map_text == '{"0,2": 2, "1,3": 1}'
    assert restore_ranks_of(plan, plan.source.replica_groups()) == restore_ranks_of(plan)


def test_a_periodic_file_is_no_dying_save() -> None:
    facts = [fact(0, HSDP), fact(2, HSDP), fact(1, HSDP, kind="periodic"), fact(3, HSDP, kind="periodic")]
    assert restore_ranks_of(planned(facts)).ranks_text == "-1"
    assert restore_ranks_of(planned([*facts, fact(3, HSDP, kind="ttp")])).ranks_text == "0,3"


@pytest.mark.parametrize(("kind", "text"), [("snapshot", "0"), ("request_exit", "0"), ("manual", "-1")])
def test_kinds(kind: str, text: str) -> None:
    assert restore_ranks_of(planned([fact(r, kind=kind) for r in range(4)])).ranks_text == text


def test_files_that_say_nothing_of_others_are_groups_of_one() -> None:
    plan = planned([fact(r, single_rank_strategy(r, 2)) for r in range(2)])
    assert restore_ranks_of(plan).map_text == '{"0": 0, "1": 1}'


def test_a_faulty_rank_whose_file_is_trusted_is_the_last_resort() -> None:
    old = [fact(r, HSDP, moment=("run", 0, 9)) for r in (1, 2, 3)]
    newer = [fact(0, HSDP, moment=("run", 1, 12), kind="periodic")]
    plan = planned([*old, *newer], faults=(1, 3))
    assert plan.moment == ("run", 0, 9)
    assert restore_ranks_of(plan).map_text == '{"0,2": 2, "1,3": 1}'


def test_a_donor_must_be_seen_by_the_whole_group() -> None:
    facts = [fact(r, visible_to=frozenset({r, r ^ 1})) for r in range(4)]
    assert restore_ranks_of(planned(facts)).ranks_text == "-1"
    assert restore_ranks_of(planned([*facts[:3], fact(3)])).map_text == '{"0,1,2,3": 3}'


def test_another_number_of_ranks() -> None:
    plan = planned([fact(r) for r in (2, 3)], World(2))
    assert plan.resharded and restore_ranks_of(plan).map_text == '{"0,1": 2}'
    sharded = planned([fact(r, HSDP) for r in range(4)], World(2))
    assert sharded.resharded and restore_ranks_of(sharded) == RestoreRanks()


def test_quoting_keeps_what_it_quotes() -> None:
    (line,) = [each for each in restore_ranks([(0, 1)], (0,)).export_lines() if "MAP" in each]
    assert json.loads(shlex.split(line)[1].partition("=")[2]) == {"0,1": 0}
