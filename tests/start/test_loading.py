"""What a killed rank gets for an object of its own at the step that only the others have reached."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.capture.copying import same_tree
from mindx_elastic.data.position import at_place_of
from mindx_elastic.start.loading import (
    MISSING,
    ChosenState,
    RingStates,
    choose,
    choose_of_loader,
    choose_parts,
    on_one_side,
)


def chosen(donated: Any, kept: RingStates, *, is_alike: bool = False, is_stream: bool = False) -> tuple[Any, bool]:
    """The state, and whether there is a doubt."""
    choice: ChosenState = choose(donated, kept, is_alike=is_alike, is_stream=is_stream)
    return choice.value, bool(choice.doubt)


def test_what_has_always_come_out_as_foreseen_is_so() -> None:
    assert chosen(7, RingStates([1], [6], newest=1, foreseen=2)) == (2, False)
    assert chosen(7, RingStates([1], [6], newest=1, foreseen=2, was_wrong=True)) == (1, True), "it has just failed"
    assert chosen(MISSING, RingStates(foreseen=2)) == (2, False), "no other rank has it"


def test_what_moves_alike_on_both_ranks_is_the_donors() -> None:
    assert chosen(7, RingStates([6, 5], [6, 5], newest=6)) == (7, False)
    assert chosen(6, RingStates([6], [6], newest=6)) == (6, False), "it does not move"
    assert chosen(7, RingStates([6, 6], [6, 6], newest=6)) == (7, True), "it moves for the first time"
    assert chosen(7, RingStates([6], [6], newest=6)) == (7, True)


def test_tensors_that_are_made_in_this_step_may_be_others_on_each_rank() -> None:
    """Errors of PowerSGD, whose counter moves alike before."""
    before: list[Any] = [{"iter": count, "errors": {}} for count in (5, 4)]
    with_errors = {"iter": 6, "errors": {0: torch.ones(3)}}
    assert chosen(with_errors, RingStates(before, before, newest=before[0])) == (with_errors, True)
    assert chosen(with_errors, RingStates(before, before, newest=before[0]), is_alike=True) == (with_errors, False)
    growing = [{"kept": [torch.full((3,), float(n)) for n in range(count)]} for count in (3, 2, 1)]
    assert not chosen(growing[0], RingStates(growing[1:], growing[1:], newest=growing[1]))[1], "it grows at each step"


@pytest.mark.parametrize("mine", [4, [6], {"value": 6}, np.arange(2)])
def test_what_differs_is_the_own_copy(mine: Any) -> None:
    value, doubt = chosen(7, RingStates([mine], [6], newest=mine))
    assert value is mine and doubt
    value, doubt = chosen(7, RingStates([6, mine], [6, 5], newest=6))
    assert value == 6 and doubt, "it differed a step before"


def test_the_place_of_a_loop_is_the_donors_whatever_the_sums_beside_it_are() -> None:
    """Else the rank would wait in collectives of its own."""
    kept = {"place": RingStates([6], [6], newest=6), "begun": RingStates(newest=1), "sum": RingStates([1.2], [1.4])}
    state, doubts = choose_parts({"place": 7, "begun": 2, "sum": 1.9}, kept.__getitem__, ("place", "begun"))
    assert state == {"place": 7, "begun": 2, "sum": 1.2}
    assert doubts.keys() == {"sum"}


def test_without_a_common_boundary_nothing_is_known() -> None:
    assert chosen(7, RingStates()) == (7, True)
    assert chosen(7, RingStates(newest=5)) == (7, True), "more often than not replicas have the same"
    assert chosen(7, RingStates(newest=5), is_stream=True) == (5, True), "two ranks would draw the same numbers"
    assert chosen(7, RingStates(), is_stream=True) == (7, True)
    assert chosen(MISSING, RingStates(newest=5)) == (5, True)
    assert chosen(MISSING, RingStates()) == (MISSING, True)


def test_loaders_and_schedulers_move_alike_unless_they_are_seen_to_differ() -> None:
    for kept in (RingStates(), RingStates(newest=5), RingStates([6, 6], [6, 6], newest=6)):
        assert chosen(7, kept, is_alike=True) == (7, False)
    assert chosen(7, RingStates([5], [6], newest=5), is_alike=True) == (7, True)


def loader_at(batch: int, start: int, **others: Any) -> dict[str, Any]:
    place = {"epoch": 2, "batch": batch, "samples": 0, "finished": False}
    return {"kind": "replay", "seed": 7, **place, "start": {"streams": np.full(3, start)}, **others}


def test_a_loader_that_begins_its_epochs_otherwise_on_each_rank_goes_on_from_its_own_beginning() -> None:
    mine, theirs = [loader_at(4, 1), loader_at(3, 1)], [loader_at(4, 0), loader_at(3, 0)]
    own_way = choose_of_loader(loader_at(5, 0), RingStates(mine, theirs, newest=mine[0]), MISSING)
    assert same_tree(own_way, loader_at(5, 1)) and same_tree(own_way, at_place_of(mine[0], loader_at(5, 0)))


def test_an_epoch_that_no_boundary_has_seen_begins_as_it_was_found_in_the_middle_of_its_first_step() -> None:
    begun = loader_at(1, 1)
    donated = loader_at(1, 0, ahead=0, per_step=1)  # found out at the end of the training's first step
    for mine in ([], [loader_at(9, 1, epoch=1)]):
        own_way = choose_of_loader(donated, RingStates(mine, mine), begun)
        assert same_tree(own_way, loader_at(1, 1, ahead=0, per_step=1))
    assert choose_of_loader(loader_at(1, 0, epoch=3), RingStates(), begun) is MISSING


def shuffled_at(epoch: int, batch: int, seed: int, **others: Any) -> dict[str, Any]:
    place = {"epoch": epoch, "batch": batch, "samples": 0, "finished": False}
    return {"kind": "resumable", "seed": seed, "num_samples": 40, **place, **others}


def test_a_loader_with_a_seed_of_each_ranks_own_keeps_it_in_any_epoch() -> None:
    """Its order follows from seed and epoch."""
    mine, theirs = [shuffled_at(2, 4, 11)], [shuffled_at(2, 4, 10)]
    for donated in (shuffled_at(2, 5, 10), shuffled_at(3, 1, 10)):
        own_way = choose_of_loader(donated, RingStates(mine, theirs, newest=mine[0]), MISSING)
        assert same_tree(own_way, {**donated, "seed": 11})
    other = RingStates([shuffled_at(2, 4, 11, num_samples=41)], theirs)
    assert choose_of_loader(shuffled_at(2, 5, 10), other, MISSING) is MISSING, "its epochs may be longer"


@pytest.mark.parametrize(
    ("donated", "mine"),
    [
        (loader_at(5, 0), loader_at(4, 0)),  # alike
        (loader_at(1, 0, epoch=3), loader_at(4, 1)),  # in the next epoch
        (loader_at(5, 0), loader_at(2, 1)),  # at another batch
        (loader_at(5, 0, following=[{}]), loader_at(4, 1)),  # fetched ahead
        (MISSING, loader_at(4, 1)),
    ],
)
def test_elsewhere_nothing_is_said_about_a_loader(donated: Any, mine: Any) -> None:
    assert choose_of_loader(donated, RingStates([mine], [loader_at(4, 0)]), MISSING) is MISSING


def test_a_boundary_is_compared_on_one_side_of_the_code_behind_the_epoch() -> None:
    """A rank was killed in that code, which another had come to the end of: all went on in front of it."""
    front = {"plain": {"lr_scheduler": 1}, "progress": {"loop": {}}}
    behind = {"plain": {"lr_scheduler": 2}, "progress": {"loop": {"in_front_of_tail": front}}}
    assert on_one_side(front, behind) == on_one_side(behind, front) == (front, front)
    assert on_one_side(behind, behind) == (behind, behind)
    assert on_one_side(front, {"plain": {}}) == (front, {"plain": {}}), "a forecast"
