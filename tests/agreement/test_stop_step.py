"""The agreement as a pure protocol: any interleaving, any rank late or dead."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mindx_elastic.agreement.stop_step import (
    CANNOT,
    FINISHED,
    LEFT,
    Decision,
    End,
    Offer,
    check_decision,
    conclude,
    parse_decision,
    parse_offer,
)
from mindx_elastic.core.printable import printable


class Cells:
    """What the store offers: atomic steps, nothing else."""

    def __init__(self) -> None:
        self.offers: dict[int, Offer] = {}
        self.decision: Decision | None = None

    def compare_and_set(self, proposal: Decision) -> Decision:
        if self.decision is None:
            self.decision = proposal
        return self.decision


def one_rank(rank: int, world: int, offer: Offer, cells: Cells, patience: int) -> Generator[None, None, Decision]:
    """One rank's side, interrupted after every atomic step; `patience` is how many turns it waits for the decision."""
    yield
    cells.offers[rank] = offer
    full = len(cells.offers) == world
    yield
    if full:
        return cells.compare_and_set(conclude([cells.offers[r] for r in range(world)]))
    while patience > 0:
        if cells.decision is not None:
            return cells.decision
        patience -= 1
        yield
    yield
    return cells.compare_and_set(Decision(None, f"rank {rank} did not hear from every rank in time"))


offers = st.one_of(st.integers(0, 40), st.builds(End, st.integers(0, 40)), st.sampled_from([CANNOT, LEFT]))


def step_of(offer: Offer) -> int | None:
    return offer.step if isinstance(offer, End) else offer if isinstance(offer, int) else None


@given(data=st.data())
def test_whoever_commits_commits_to_one_step_under_any_interleaving(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 6), label="world")
    made = data.draw(st.lists(offers, min_size=world, max_size=world), label="offers")
    patience = data.draw(st.lists(st.integers(0, 8), min_size=world, max_size=world), label="patience")
    dies_after = data.draw(st.lists(st.integers(0, 12), min_size=world, max_size=world), label="dies after")
    cells = Cells()
    ranks = {r: one_rank(r, world, made[r], cells, patience[r]) for r in range(world)}
    turns = dict.fromkeys(ranks, 0)
    decided: dict[int, Decision] = {}
    while ranks:
        rank = data.draw(st.sampled_from(sorted(ranks)), label="next")
        turns[rank] += 1
        if turns[rank] > dies_after[rank]:
            del ranks[rank]  # dead: it takes no further step, and the others must not need it
            continue
        try:
            next(ranks[rank])
        except StopIteration as end:
            decided[rank] = end.value
            del ranks[rank]
        # Nobody waits past the bound: offer, patience turns, time-out, decision.
        assert turns[rank] <= patience[rank] + 5
    assert len(set(decided.values())) <= 1, decided
    for decision in decided.values():
        if decision.step is not None:
            assert CANNOT not in made
            steps = [step for offer in made if (step := step_of(offer)) is not None]
            assert decision.step == max(steps), "some rank would have to go back"
        if decision == FINISHED:
            assert not any(isinstance(offer, int) for offer in made), "an alarm was heard: nobody may leave unsaved"


@given(made=st.lists(offers, min_size=1, max_size=5), data=st.data())
def test_every_decision_that_follows_from_offers_is_believed_by_who_made_them(
    made: list[Offer], data: st.DataObject
) -> None:
    mine = data.draw(st.sampled_from(made))
    assert check_decision(conclude(made), mine, trusted=True) == conclude(made)
    alone = Decision(None, "somebody waited long enough")
    assert check_decision(alone, mine, trusted=False) == alone


@pytest.mark.parametrize(
    ("decision", "offer", "trusted"),
    [
        (FINISHED, 7, True),  # a stop would be ignored
        (FINISHED, CANNOT, True),
        (Decision(6), 7, True),
        (Decision(6), End(7), True),
        (Decision(7), CANNOT, True),
        (Decision(10**9), 7, False),  # a stop would be put off
    ],
)
def test_a_decision_that_cannot_be_is_not_obeyed(decision: Decision, offer: Offer, trusted: bool) -> None:
    with pytest.raises(ValueError, match=r"step|finished"):
        check_decision(decision, offer, trusted=trusted)


@given(text=st.one_of(st.text(), st.from_regex(r"(end:)?[-+ ]?[0-9_]{1,20}\.?"), offers.map(str)))
@example("\u0665")
@example("9" * 5000)
def test_only_what_a_rank_writes_is_an_offer(text: str) -> None:
    digits = text.removeprefix("end:")
    if text in (CANNOT, LEFT) or (re.fullmatch("[0-9]{1,16}", digits) and int(digits) < 1 << 53):
        offer = parse_offer(text)
        assert parse_offer(str(offer)) == offer and step_of(offer) == (None if text in (CANNOT, LEFT) else int(digits))
    else:
        with pytest.raises(ValueError, match="not an offer"):
            parse_offer(text)


json_values = st.one_of(st.none(), st.booleans(), st.integers(-9, 1 << 60), st.floats(), st.text())


@given(step=json_values, reason=json_values, more=st.booleans())
def test_only_what_a_rank_writes_is_a_decision(step: object, reason: object, more: bool) -> None:
    text = json.dumps({"step": step, "reason": reason, **({"more": 1} if more else {})})
    is_step = step is None or (type(step) is int and 0 <= step < 1 << 53)
    if is_step and isinstance(reason, str) and not more:
        decision = parse_decision(text)
        assert (decision.step, decision.reason) == (step, printable(reason))
        assert decision.reason.isprintable() and parse_decision(decision.encode()).step == step
    else:
        with pytest.raises(ValueError, match="not a stop decision"):
            parse_decision(text)


@pytest.mark.parametrize("text", ["", "[]x", "[" * 8000, "null", '{"step": 1, "reason": "%s"}' % ("x" * 9000)])
def test_what_is_no_decision_at_all(text: str) -> None:
    with pytest.raises(ValueError, match="decision"):
        parse_decision(text)
