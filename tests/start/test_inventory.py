"""What is there, judged once for all who ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.persist.catalog import read_entries
from mindx_elastic.start.facts import FileFact, Refusal, ResumePlan, World
from mindx_elastic.start.inventory import Inventory, SavedStep, newest_complete, until_sound
from mindx_elastic.start.odd_steps import OddStep, OddSteps, odd_steps_path
from mindx_elastic.start.unused_state import RecordedSaves
from tests.checkpoint_files import cut_off_end, write, write_step
from tests.start.arenas import Machine
from tests.start.looks import Carrier, look, look_alone, sent

REPLICAS: dict[str, Any] = {"coordinates": {"replicas": 2}}


def merged(places: Sequence[Path], arenas: Sequence[Path] | None = None, **options: Any) -> Inventory:
    return Inventory.merge(sent(look(places, arenas, **options)))


def planned(plan: ResumePlan | Refusal) -> ResumePlan:
    assert isinstance(plan, ResumePlan), plan
    return plan


def fact_at(inventory: Inventory, path: Path) -> FileFact:
    return next(fact for fact in inventory.facts if fact.path == str(path))


# --- what several ranks see ---


def test_a_copy_elsewhere_counts_for_its_own_rank_when_it_can_be_fetched(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for rank in range(2):
        write(nodes[0] / f"rank_{rank}" / "a-1_7.safetensors", step=7, rank=rank, world_size=2)
    nodes[1].mkdir()
    inventory = merged(nodes, transport=Carrier())
    copy = fact_at(inventory, nodes[0] / "rank_1" / "a-1_7.safetensors")
    assert copy.visible_to is None and 1 not in inventory.seen_by(copy)
    assert inventory.sources(1, copy) == [(0, (0, "rank_1/a-1_7.safetensors"))]
    assert planned(inventory.plan(World(2))).ranks[1].file == copy
    inventory.forget(1, copy, "the wire was cut")
    assert fact_at(inventory, Path(copy.path)).visible_to == frozenset({0})
    assert isinstance(inventory.plan(World(2)), Refusal)
    assert isinstance(merged(nodes).plan(World(2)), Refusal)


def test_an_attempts_files_of_an_odd_step_and_later_ones_are_not_used(tmp_path: Path) -> None:
    """Whichever node's disk has the record. The attempt that has made the step again is used."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for rank, node in enumerate(nodes):
        for step in (6, 7, 8):
            write(node / f"rank_{rank}" / f"a-1_{step}.safetensors", step=step, rank=rank, world_size=2)
    odd = OddSteps([OddStep("run-a", 0, 7, 1, "loss nan", "open")])
    odd_steps_path(nodes[1], 1).write_bytes(odd.as_json())
    inventory = merged(nodes)
    plan = planned(inventory.plan(World(2)))
    assert plan.step == 6
    assert sorted(each.moment[2] for each in plan.rejected if each.moment) == [7, 8]
    why = "step 7 was odd on rank 1 (loss nan); odd_steps_rank_1.json says so"
    assert inventory.lines(plan.rejected) == [f"run run-a step 7 is not used: {why}"]
    alone = {Path(path).name: entry.problem for path, entry in look_alone(nodes[1]).entries.items()}
    assert alone == {f"a-1_{step}.safetensors": None if step == 6 else f"not used: {why}" for step in (6, 7, 8)}
    for rank, node in enumerate(nodes):
        write(node / f"rank_{rank}" / "b-1_7.safetensors", step=7, rank=rank, world_size=2, attempt=1)
    assert planned(merged(nodes).plan(World(2))).moment == ("run-a", 1, 7)


def test_a_rank_speaks_of_its_own_small_states_only(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    machine.know("run-a")
    machine.snapshot(5)
    machine.boundary(1, 5)
    found = look([machine.directory] * 2, [machine.job] * 2)
    assert Inventory.merge(found).own_states == {("run-a", 0, 5): {1}}
    with pytest.raises(ValueError, match="rank 0"):
        Inventory.merge(found[::-1])


# --- memory ---


def test_memory_counts_for_runs_that_any_rank_knows(tmp_path: Path) -> None:
    machines = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        machines.append(Machine(tmp_path / str(rank), 2))
        machines[rank].snapshot(5, ranks=[rank])
    directories, jobs = [m.directory for m in machines], [m.job for m in machines]
    assert not merged(directories, jobs).facts
    machines[1].know("run-a")
    inventory = merged(directories, jobs)
    assert [(fact.rank, fact.visible_to) for fact in inventory.facts] == [(0, frozenset({0})), (1, frozenset({1}))]
    assert planned(inventory.plan(World(2))).step == 5 and inventory.next_attempt("run-a") == 1


def test_a_forecast_that_failed_on_another_rank_does_not_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    machine.know("run-a")
    machine.snapshot(5, coordinates={"foreseen": 0})
    machine.boundary(0, 5, forecast=True)
    assert look_alone(machine.directory, machine.job).own_states == {}
    machine.snapshot(6)
    machine.boundary(0, 6, forecast=True)
    assert look_alone(machine.directory, machine.job).own_states == {("run-a", 0, 6): {0}}


def test_the_forecast_of_a_first_step_counts_where_another_ranks_came_true(tmp_path: Path) -> None:
    """No other of this rank's has come true before it: rank 0 was killed in step 1, which rank 1 has ended."""
    machine = Machine(tmp_path, 2)
    machine.know("run-a")
    machine.boundary(0, 1, forecast=True, trusted=False)
    machine.boundary(1, 1, run="unknown")
    machine.snapshot(1, ranks=[1])
    assert look_alone(machine.directory, machine.job).own_states == {}, "nothing is known of any forecast"
    machine.snapshot(1, ranks=[1], coordinates={"foreseen": 1})
    assert look_alone(machine.directory, machine.job).own_states == {("run-a", 0, 1): {0}}
    found = Inventory.merge(sent(look([machine.directory] * 2, [machine.job] * 2)))
    assert found.own_states == {("run-a", 0, 1): {0}}, "the ranks tell each other"
    machine.snapshot(2, ranks=[1], coordinates={"foreseen": 1})
    assert not look_alone(machine.directory, machine.job).own_states.get(("run-a", 0, 2)), "there is none of step 2"


# --- doing without ---


def test_what_was_damaged_is_done_without_and_said(tmp_path: Path) -> None:
    for step in (5, 7):
        write_step(tmp_path, step)
    inventory = look_alone(tmp_path)
    victim = fact_at(inventory, tmp_path / "rank_1" / "resnet-1_7.safetensors")
    checked: list[int] = []

    def check(plan: ResumePlan | Refusal) -> list[tuple[int | None, FileFact, str]]:
        files = [share.file for share in planned(plan).ranks]
        checked.extend(fact.moment[2] for fact in files)
        return [(None, victim, "a bit has flipped")] if victim in files else []

    plan = planned(until_sound(inventory, lambda: inventory.plan(World(2)), check))
    assert (plan.step, plan.steps_lost, checked) == (5, 2, [7, 7, 5, 5])
    assert [str(one) for one in plan.rejected if one.what == victim.path] == [
        f"{victim.path} is not used: a bit has flipped"
    ]
    assert f"{victim.path}: a bit has flipped" in inventory.lines(plan.rejected)
    assert not inventory.is_all_known


def test_a_first_save_that_was_cut_off(tmp_path: Path) -> None:
    write(tmp_path / "rank_0" / "a-1_4.safetensors", step=4, world_size=2)
    recorded = {"run-a": RecordedSaves({0, 1}, {(0, 4)})}
    assert merged([tmp_path] * 2).was_never_complete(recorded)
    assert not merged([tmp_path] * 2).was_never_complete({}), "of another run"
    assert not merged([tmp_path] * 2).was_never_complete({"run-a": RecordedSaves({0}, {(0, 4)})}), (
        "rank 1's log is lost"
    )
    lost = {"run-a": RecordedSaves({0, 1}, {(0, 4), (1, 4)})}
    assert not merged([tmp_path] * 2).was_never_complete(lost), "a disk is lost"
    cut_off_end(write(tmp_path / "rank_0" / "a-1_5.safetensors", step=5, world_size=2))
    assert not merged([tmp_path] * 2).was_never_complete(recorded)


# --- a step is judged once ---


def only_step(inventory: Inventory) -> SavedStep:
    (step,) = inventory.steps
    return step


def test_a_step_of_which_nothing_can_be_resumed_from_is_listed(tmp_path: Path) -> None:
    write(tmp_path / "a-1_1.safetensors", resumable=False)
    inventory = look_alone(tmp_path)
    step = only_step(inventory)
    assert step.why_incomplete == "rank 0 saved a state that cannot be resumed from" and not step.facts
    assert inventory.newest_complete() is None


def test_a_replica_makes_a_step_usable_and_the_small_state_makes_it_complete(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    write_step(machine.directory, 3, **REPLICAS)
    write_step(machine.directory, 5, **REPLICAS)
    (machine.directory / "rank_1" / "resnet-1_5.safetensors").unlink()
    step, older = look_alone(machine.directory, machine.job).steps
    assert step.is_usable and not step.is_complete and step.why_incomplete == "rank 1 of 2 missing"
    refused = look_alone(machine.directory).plan(World(2), step=6)
    assert isinstance(refused, Refusal) and "steps that are there: 5, 3" in str(refused)
    assert older.is_complete
    machine.boundary(1, 5)
    step, _ = look_alone(machine.directory, machine.job).steps
    assert step.is_complete and step.missing_ranks == [1] and step.why_incomplete is None


# --- for retention ---


def test_retention_goes_by_the_same_judgement(tmp_path: Path) -> None:
    for step in (3, 5, 7, 9):
        write_step(tmp_path, step, world_size=3)
    write_step(tmp_path, 20, run_id="another")
    (tmp_path / "rank_1" / "resnet-1_9.safetensors").unlink()
    contradicting = {"world_size": 4, "rank": 2, "step": 7}
    write(tmp_path / "rank_2" / "resnet-1_7.safetensors", **contradicting)
    assert newest_complete(read_entries(tmp_path), "run-a") == ("run-a", 0, 5)
    alone = look_alone(tmp_path).newest_complete("run-a")
    assert alone is not None and alone.moment == ("run-a", 0, 5)
    assert newest_complete(read_entries(tmp_path), "nobody") is None
