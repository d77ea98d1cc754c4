"""The agreement as a pure protocol: any interleaving, any rank late or dead."""

from __future__ import annotations

import json
import re

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

offers = st.one_of(st.integers(0, 40), st.builds(End, st.integers(0, 40)), st.sampled_from([CANNOT, LEFT]))


def step_of(offer: Offer) -> int | None:
    return offer.step if isinstance(offer, End) else offer if isinstance(offer, int) else None


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


@given(step=json_values, reason=json_values)
@example(step=-1, reason="")
def test_only_what_a_rank_writes_is_a_decision(step: object, reason: object) -> None:
    text = json.dumps({"step": step, "reason": reason})
    is_step = step is None or (type(step) is int and 0 <= step < 1 << 53)
    if is_step and isinstance(reason, str):
        decision = parse_decision(text)
        assert (decision.step, decision.reason) == (step, printable(reason))
        assert decision.reason.isprintable() and parse_decision(decision.encode()).step == step
    else:
        with pytest.raises(ValueError, match="not a stop decision"):
            parse_decision(text)


def test_what_is_no_decision_at_all() -> None:
    for text in ("", "[]x", "[" * 8000, "null", '{"step": 1, "reason": "%s"}' % ("x" * 9000)):
        with pytest.raises(ValueError, match="decision"):
            parse_decision(text)
