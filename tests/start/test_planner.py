"""What the planner says, and rules that `oracle` does not know: bases of attempts, donors' order, reports, meshes.

Which step is chosen of which files, faults and layouts: `test_planner_properties`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.start.assumptions import replica_digests_of
from mindx_elastic.start.facts import FileFact, KnownFaults, Refusal, Rejected, ResumePlan, World, single_rank_strategy
from mindx_elastic.start.planner import bases_of, order_of_moments, plan_resume, steps_before
from tests.start.strategies import layout_of, replicated

RUN = "run-a"


def tensor(name: str, shape: tuple[int, ...], layout: Layout, parameter: str = "") -> TensorSpec:
    return TensorSpec(name, shape, layout, "F32", parameter)


DDP = replicated(4, {"w": (8, 4)}, "F32")
FSDP = Strategy(4, (tensor("w", (8, 4), layout_of((4,), "S(0)", names=("dp",))),))
HSDP = Strategy(4, (tensor("w", (8, 4), layout_of((2, 2), "R", "S(0)", names=("dp", "fsdp"))),))
FSDP_TP = Strategy(4, (tensor("w", (9, 4), layout_of((2, 2), "_S(0,2)", "S(0)", names=("dp", "tp"))),))
STAGES = Strategy(
    4,
    (
        tensor("layers.0", (8,), layout_of((2,), "R", ranks=(0, 1))),
        tensor("layers.1", (8,), layout_of((2,), "R", ranks=(2, 3))),
    ),
)


def file(
    rank: int,
    step: int = 10,
    strategy: Strategy = DDP,
    *,
    kind: str = "breakpoint",
    attempt: int = 0,
    run: str = RUN,
    **more: Any,
) -> FileFact:
    path = f"/{run}/{attempt}/{step}/rank_{rank}/{kind}"
    more.setdefault("world_size", strategy.world_size)
    return FileFact(path, rank, (run, attempt, step), strategy=strategy, kind=kind, **more)


def files(ranks: Iterable[int], step: int = 10, strategy: Strategy = DDP, **more: Any) -> list[FileFact]:
    return [file(rank, step, strategy, **more) for rank in ranks]


def plan_of(facts: list[FileFact], world: int | World = 4, **more: Any) -> ResumePlan:
    plan = plan_resume(facts, World(world) if isinstance(world, int) else world, **more)
    assert isinstance(plan, ResumePlan), str(plan)
    return plan


def refusal_of(facts: list[FileFact], world: int | World = 4, **more: Any) -> Refusal:
    plan = plan_resume(facts, World(world) if isinstance(world, int) else world, **more)
    assert isinstance(plan, Refusal)
    return plan


def readers(plan: ResumePlan) -> list[int]:
    """For each new rank the old one whose file it takes."""
    return [each.file.rank for each in plan.ranks]


def assuming(*digests: str) -> list[FileFact]:
    """Files of ranks that assume to hold the same `model.norm`; what differs in their digests is not the same."""
    spec = replace(tensor("model.norm", (4,), layout_of((4,), "R")), assumed=True)
    strategy = Strategy(4, (spec,))
    found = []
    for rank, digest in enumerate(digests):
        if digest:
            tensors = {"model.norm": ((4,), digest)}
            found.append(
                replace(
                    files([rank], strategy=strategy)[0], replica_digests=replica_digests_of(strategy, rank, tensors)
                )
            )
    return found


# --- which step ---


def test_it_falls_back_step_by_step_and_says_why() -> None:
    torn = Rejected("/ckpt/torn", "its header is damaged")
    plan = plan_of([*files([0, 1, 2], 12, FSDP), *files(range(4), 10, FSDP)], rejected=[torn])
    assert (plan.step, plan.steps_lost) == (10, 2) and torn in plan.rejected
    assert [(rejected.moment, rejected.reason) for rejected in plan.rejected if rejected != torn] == [
        ((RUN, 0, 12), "part 4 of 4 of w: no usable file of rank 3, which held it")
    ]


def test_what_a_rank_of_an_older_version_alone_has_goes_with_it_to_an_older_step_and_is_no_other_program() -> None:
    others = replicated(3, {"model.w": (8, 4)}, "F32")
    program = replicated(3, {"model.w": (8, 4), "ema.w": (8, 4)}, "F32")  # as rank 0 tells it: no other has an average
    newest = files([1, 2], 12, others)
    plan = plan_of([*newest, file(0, 10, program), *files([1, 2], 10, others)], World(3, program))
    assert plan.step == 10
    refusal = refusal_of(newest, World(3, program))
    assert not refusal.is_other_program
    assert refusal.reasons[0].reason == "ema.w: in none of its files, and rank 0 left none"


def test_another_program_is_refused_and_names_that_the_files_own_program_gave_are_left_to_the_load() -> None:
    """`torch.nn.utils.prune` calls a parameter ``weight_orig`` from the step on in which the program prunes it."""
    others = replicated(3, {"model.w": (8, 4)}, "F32")
    another = World(3, replicated(3, {"model.w": (8, 5)}, "F32"))
    assert refusal_of(files([1, 2], 12, others), another).is_other_program
    assert refusal_of(files(range(3), 12, others), another).is_other_program
    pruned = replicated(3, {"model.w_orig": (8, 4)}, "F32")
    assert plan_of([*files([1, 2], 12, pruned), *files(range(3), 2, others)], World(3, others)).step == 12


def test_moments_are_tried_run_by_run_attempt_by_attempt_step_by_step() -> None:
    facts = [
        file(0, 5, run="b", created=1.0),
        file(0, 7, run="a", created=9.0),
        file(0, 9, run="a", created=2.0),
        file(0, 3, run="a", attempt=1, created=3.0),
    ]
    assert order_of_moments(facts) == [("a", 1, 3), ("a", 0, 9), ("a", 0, 7), ("b", 0, 5)]
    begun_later = replace(facts[0], generation=1)  # by the count of starts, and not by a clock
    assert order_of_moments([begun_later, *facts[1:]])[0] == ("b", 0, 5)


def test_only_the_step_asked_for_is_taken() -> None:
    facts = [*files(range(4), 10), *files(range(4), 9)]
    assert plan_of(facts, only=[(RUN, 0, 9)]).step == 9
    refusal = refusal_of([*files([0], 10, FSDP), *files(range(4), 9, FSDP)], only=[(RUN, 0, 10)])
    assert [rejected.moment for rejected in refusal.reasons] == [(RUN, 0, 10)]
    assert not refusal_of(files(range(4), 10), only=[(RUN, 0, 99)]).reasons


# --- donors ---


def test_donors_are_healthy_ranks_first_then_the_lowest_in_turn() -> None:
    assert readers(plan_of(files([1, 2, 3], kind="periodic"), faults=[0, 1])) == [2, 1, 2, 3]
    ddp = replicated(8, {"w": (8,)})
    assert readers(plan_of(files([1, 4, 6], strategy=ddp), 8)) == [1, 1, 4, 6, 4, 1, 6, 4]


# --- what is said of files and what is not ---


def test_private_models_are_refused_on_another_world() -> None:
    facts = [file(rank, strategy=single_rank_strategy(rank, 3)) for rank in range(3)]
    assert len(refusal_of(facts, 2).reasons) == 1
    assert refusal_of(facts, World(2, Strategy(2, (tensor("w", (8,), layout_of((2,), "R")),)))).reasons


def test_contradictory_strategies_are_refused_by_name_and_an_older_step_is_taken() -> None:
    other = Strategy(4, (tensor("w", (8, 5), layout_of((4,), "R")),))
    plan = plan_of([file(0, 10), *files([1, 2, 3], 10, other), *files(range(4), 9)])
    assert plan.step == 9
    (rejected,) = plan.rejected
    assert "contradict" in rejected.reason
    assert all(part in rejected.reason for part in ("of w: ", "[8, 4]", "[8, 5]"))


# --- faults ---


def test_a_step_that_is_not_taken_because_of_a_fault_report_says_so() -> None:
    facts = [*files(range(4), 10, FSDP, kind="breakpoint"), *files(range(4), 8, FSDP, kind="periodic")]
    plan = plan_of(facts, faults=[2])
    assert plan.step == 8 and plan.faults == {2}
    reason = plan.rejected[0].reason
    assert "the fault report names rank 2, whose dying saves are not used: if that is wrong, correct" in reason
    assert "start with MINDX_FAULT_DIR" in reason


def test_a_donor_that_stands_in_because_of_a_fault_report_says_so() -> None:
    plan = plan_of(files(range(4), 10, kind="breakpoint"), faults=[2])
    assert plan.step == 10 and plan.ranks[2].donor is not None
    (rejected,) = plan.rejected
    assert rejected.what.endswith("step 10, rank 2") and "the fault report names rank 2" in rejected.reason


# --- exact before newest ---


@pytest.mark.parametrize(
    ("older", "taken"),
    [
        ([(0, 6)], (0, 6)),
        ([(0, 5)], (0, 5)),  # step 6 is damaged by now: the one before it is on the way, too
        ([(0, 4)], (3, 7)),  # too old
        ([(2, 6), (0, 6)], (0, 6)),  # attempt 2 came to a step 6 of its own, on another way
        ([(0, 6), (3, 6)], (3, 6)),  # the same state, saved again in this attempt
    ],
)
def test_an_attempt_may_go_on_from_one_long_before(older: list[tuple[int, int]], taken: tuple[int, int]) -> None:
    facts = files([0, 1, 2], 7, attempt=3, base=(0, 6))
    for attempt, step in older:
        facts += files(range(4), step, attempt=attempt, base=(0, 6) if attempt == 3 else None)
    assert plan_of(facts).moment == (RUN, *taken)


def test_where_an_attempt_began_counts_only_if_its_files_agree() -> None:
    facts = [file(0, 7, attempt=2, base=(0, 6)), file(1, 7, attempt=2, base=(1, 6)), file(2, 7, attempt=2)]
    facts += [*files(range(4), 6), *files(range(4), 6, attempt=1)]
    assert plan_of(facts).moment == (RUN, 2, 7)
    assert bases_of(facts) == {}
    assert bases_of([file(0, 7, attempt=2, base=(2, 6)), file(1, 7, attempt=1, base=(3, 6))]) == {}  # none began later


def test_the_steps_before_follow_the_attempts_down() -> None:
    bases = {(RUN, 3): (RUN, 2, 6), (RUN, 2): (RUN, 0, 6), ("other", 3): ("other", 0, 2)}
    assert steps_before((RUN, 3, 8), bases) == [(RUN, 3, 7), (RUN, 3, 6), (RUN, 2, 6), (RUN, 0, 6)]
    assert steps_before((RUN, 3, 7), bases) == [(RUN, 3, 6), (RUN, 2, 6), (RUN, 0, 6), (RUN, 0, 5)]
    assert steps_before((RUN, 3, 6), bases) == [(RUN, 2, 6), (RUN, 0, 6), (RUN, 0, 5), (RUN, 0, 4)]
    assert steps_before((RUN, 0, 1), bases) == [(RUN, 0, 0)]
    assert steps_before((RUN, 0, 0), bases) == []


# --- another world ---


def test_tensors_of_one_name_on_different_ranks_are_refused_on_another_world() -> None:
    strategy = Strategy(4, tuple(tensor("w", (8,), layout_of((1,), "R", ranks=(r,))) for r in range(4)))
    assert readers(plan_of(files(range(4), strategy=strategy))) == [0, 1, 2, 3]
    told = World(2, replicated(2, {"w": (8,)}, "F32"))
    assert "different tensors are called w" in str(refusal_of(files(range(4), strategy=strategy), told))


def test_a_mesh_of_two_dimensions_on_another_world_has_to_be_told() -> None:
    assert "for 2 ranks, the world has 4" in str(refusal_of(files(range(4)), World(4, replicated(2, {"w": (8, 4)}))))
    refusal = refusal_of(files(range(4), strategy=FSDP_TP), 8)
    assert "its layout over 8 ranks must be given" in str(refusal) and refusal.other_worlds == (4,)


# --- what a report is believed to say, and what files assume ---


def test_a_report_that_the_last_attempt_knew_at_its_start_is_done() -> None:
    faults = KnownFaults.of({1}, 5.0)
    known = [replace(fact, kind="breakpoint", fault_report=faults.report) for fact in files(range(4))]
    assert [share.donor for share in plan_of(known, World(4), faults=faults).ranks] == [None] * 4
    fresh = [replace(fact, fault_report=0) for fact in known]
    assert plan_of(fresh, World(4), faults=faults).ranks[1].donor is not None


def test_a_distrusted_save_stays_distrusted_in_later_attempts() -> None:
    faults = KnownFaults.of({3}, 5.0)
    spoilt = [replace(fact, kind="breakpoint") for fact in files(range(4), step=95, strategy=FSDP)]
    sound = [replace(fact, kind="periodic") for fact in files(range(4), step=90, strategy=FSDP)]
    later = files([0], step=92, attempt=1, strategy=FSDP)
    later = [replace(fact, kind="breakpoint", fault_report=faults.report) for fact in later]
    assert plan_of([*spoilt, *sound, *later], World(4), faults=faults).step == 90


def test_assumed_replicas_stand_in_where_their_files_agree() -> None:
    assert [share.file.rank for share in plan_of(assuming("a", "a", "", "a"), World(4)).ranks] == [0, 1, 0, 3]


@pytest.mark.parametrize("digests", [("a", "b", "", "a"), ("a", "", "", "")])
def test_nobody_stands_in_where_they_differ_or_only_one_speaks(digests: tuple[str, ...]) -> None:
    assert "model.norm: no usable file of rank 2, which held it" in str(refusal_of(assuming(*digests), 4))
    whole = assuming(*(digest or "a" for digest in digests))
    assert plan_of(whole, World(4)).exact, "each has its own file"
