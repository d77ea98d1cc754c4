"""The agreement as a pure protocol: any interleaving, any rank late or dead."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import given
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


@given(made=st.lists(offers, min_size=1, max_size=8))
def test_all_offers_give_the_largest_step_unless_one_rank_is_torn(made: list[Offer]) -> None:
    decision = conclude(made)
    if CANNOT in made:
        assert decision.step is None
        assert decision.reason
    elif not any(isinstance(offer, int) for offer in made):
        assert decision == FINISHED
    else:
        assert decision.step == max(step for offer in made if (step := step_of(offer)) is not None)


@given(step=st.one_of(st.none(), st.integers(0, 10**12)), reason=st.text())
def test_a_decision_survives_the_exchange(step: int | None, reason: str) -> None:
    assert parse_decision(Decision(step, reason).encode()) == Decision(step, printable(reason, 300))


@given(offer=offers)
def test_an_offer_survives_the_exchange(offer: Offer) -> None:
    assert parse_offer(str(offer)) == offer


@pytest.mark.parametrize("text", ["", "-1", "end:", "end:-1", "3.5", "soon", "null"])
def test_a_bad_offer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"offer|invalid literal"):
        parse_offer(text)


@pytest.mark.parametrize(
    "text", ['{"step": -1, "reason": ""}', '{"step": true, "reason": ""}', "[]x", '{"step": "1", "reason": ""}']
)
def test_a_bad_decision_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"decision|JSON|Expecting|Extra"):
        parse_decision(text)


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


def test_ranks_that_drift_far_apart_are_believed_where_nobody_else_can_write() -> None:
    assert check_decision(Decision(10**6), 7, trusted=True).step == 10**6
    assert check_decision(Decision(9_000), 7, trusted=False).step == 9_000


@pytest.mark.parametrize("text", ["9" * 5000, "\u0665", "1_0", " 7", "+7", "end: 7", "9" * 17])
def test_only_numbers_as_we_write_them_are_offers(text: str) -> None:
    with pytest.raises(ValueError, match="offer"):
        parse_offer(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 8000,
        "{}",
        "null",
        '{"step": 1e3, "reason": ""}',
        '{"step": 1, "reason": 5}',
        '{"step": 1, "reason": "", "more": 1}',
        '{"step": 99999999999999999999, "reason": ""}',
        '{"step": 1, "reason": "%s"}' % ("x" * 9000),
    ],
)
def test_what_looks_like_a_decision_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="decision"):
        parse_decision(text)


def test_a_reason_from_elsewhere_is_shown_not_obeyed() -> None:
    text = Decision(3, "\x1b]8;;http://x\x1b\\ \r\n" + "y" * 9999).encode()
    assert parse_decision(text).reason.isprintable()
