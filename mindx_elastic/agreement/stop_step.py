"""The protocol by which the ranks agree on one stop step. Pure: no threads, no clock, no network.

Every rank makes one *offer* a round: the boundary that it can stop at, or `CANNOT` (its state is torn), or `LEFT` (it
has finished training). Once all offers are in, the stop step is the largest one: slower ranks run up to it.
The first rank to conclude writes the decision into a cell by compare-and-set, and all ranks do what the cell says, so
two ranks never commit to different steps. A rank that waits too long proposes `alone` for the same cell: if it wins,
every rank acts alone (each saves its own last boundary, the planner decides at the next start); if it loses, it obeys
the agreed step.

A rank that reaches the end of its training makes an `End` offer for the same round and waits for the others a moment:
if all have reached it, the job is finished; if any of them heard an alarm before, they all save that boundary.
So no rank leaves without a save while another one stops at the very last step.

The first round is over *coming* boundaries (each rank holds back at the boundary it offered). The second, taken when
the deadline is near or a rank has failed, is over *held* boundaries: the last one each rank can still reproduce.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from mindx_elastic.core.fields import Between, Words, read_text
from mindx_elastic.core.printable import printable

__all__ = [
    "CANNOT",
    "FINISHED",
    "LEFT",
    "MAX_CELL",
    "Decision",
    "End",
    "Offer",
    "check_decision",
    "conclude",
    "parse_decision",
    "parse_offer",
]

CANNOT = "cannot"
LEFT = "left"
MAX_CELL = 8192
"""Longest offer or decision, in characters."""
_MAX_REASON = 300
_MOST_STEPS = 1 << 53  # what every JSON reader keeps exact
_MOST_AHEAD = 10_000  # steps that another rank may be ahead; far more than can be run within a grace period


class End(NamedTuple):
    """An offer made without an alarm: this rank has reached its last boundary, `step`, and is ready to finish."""

    step: int

    def __str__(self) -> str:
        return f"end:{self.step}"


Offer = int | str | End
"""A step (>= 0), `End`, `CANNOT` or `LEFT`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a round ended with. `step` is set when the ranks act together, None when each acts alone."""

    step: Annotated[int, Between(0, _MOST_STEPS - 1)] | None
    reason: Annotated[str, Words(MAX_CELL)] = ""

    def encode(self) -> str:
        return json.dumps({"step": self.step, "reason": printable(self.reason, _MAX_REASON)})


FINISHED = Decision(None, "every rank has finished training")
"""All ranks have reached their end and none heard an alarm before: there is nothing to save."""


def parse_decision(text: str) -> Decision:
    """Inverse of `Decision.encode`. Raises ValueError for anything else."""
    try:
        return read_text(Decision, text, MAX_CELL)
    except ValueError as error:
        raise ValueError(f"not a stop decision ({error}): {printable(text, 60)!r}") from None


def parse_offer(text: str) -> Offer:
    """Read an offer from the exchange. Raises ValueError for anything else."""
    if text in (CANNOT, LEFT):
        return text
    digits = text.removeprefix("end:")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 16 or int(digits) >= _MOST_STEPS:
        raise ValueError(f"not an offer: {printable(text, 60)!r}")
    return End(int(digits)) if text.startswith("end:") else int(digits)


def check_decision(decision: Decision, offer: Offer, *, trusted: bool) -> Decision:
    """Return `decision` if it can follow from offers that include this rank's `offer`. Raises ValueError if not.

    A forged decision in the store must not make a rank ignore a stop: a rank accepts "all have finished" only at its
    own end, and never runs to a step before its own or, where strangers may write to the store (not `trusted`), to one
    far ahead.
    """
    if decision == FINISHED:
        if offer != LEFT and not isinstance(offer, End):
            raise ValueError("it says that every rank has finished, and this one has not")
        return decision
    if decision.step is None or offer == LEFT:
        return decision
    if offer == CANNOT:
        raise ValueError(f"a common step {decision.step}, though this rank has no boundary to offer")
    mine = offer.step if isinstance(offer, End) else int(offer)
    if decision.step < mine:
        raise ValueError(f"step {decision.step} comes before step {mine}, which this rank has offered")
    if not trusted and decision.step > mine + _MOST_AHEAD:
        raise ValueError(f"step {decision.step} is out of reach of step {mine}, which this rank has offered")
    return decision


def conclude(offers: Sequence[Offer]) -> Decision:
    """Return the decision that follows from the offers of *all* ranks."""
    torn = [rank for rank, offer in enumerate(offers) if offer == CANNOT]
    if torn:
        return Decision(None, f"rank {torn[0]} has no boundary to offer (its update was cut off)")
    if all(offer == LEFT or isinstance(offer, End) for offer in offers):
        return FINISHED
    return Decision(max(offer.step if isinstance(offer, End) else int(offer) for offer in offers if offer != LEFT))
