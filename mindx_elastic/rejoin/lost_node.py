"""What the first node's agent does when it has lost another node, and which agents keep what a lost node had. Pure.

All ranks of the node are gone with its agent, and only another node can start new processes for them: there is a
*place* to take. The survivors wait for that with their guards open, as long as none of the dead ranks counts in a
verdict.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.rejoin.protocol import Coordinator, Phase, Report, decide

__all__ = ["FIRST", "Answer", "answer", "keepers", "why_in_vain"]

FIRST = 0
"""The node whose agent hosts the workers' store."""
_NUM_KEEPERS = 2


class Answer(Enum):
    """To the loss of a node."""

    NOTHING = "nothing"
    """The job is being restarted already."""
    OPEN = "open"
    """Its place is open in the recovery that is under way, or begins because of it."""
    CALL_OFF = "call off"
    """The recovery under way cannot do without this node: the job is restarted."""


def answer(machine: Coordinator, ranks: Collection[int], *, has_joined: bool, is_open: bool) -> Answer:
    """In a recovery, or behind one that has come to nothing. `ranks`: of the lost node. has_joined: a new process for
    one of them has begun to connect to the others. is_open: another node's place is open already, or was taken."""
    if machine.phase is Phase.FALLBACK:
        return Answer.NOTHING
    if has_joined or machine.has_state:
        return Answer.CALL_OFF
    if machine.phase is Phase.CUT:  # a rank that has reported counts as a survivor in every rank's verdict
        has_reported = any(machine.reports.get(rank) is not None for rank in ranks)
        return Answer.CALL_OFF if has_reported else Answer.OPEN
    if is_open:
        return Answer.CALL_OFF
    assert machine.verdict is not None
    return Answer.OPEN if set(ranks) <= set(machine.verdict.dead) else Answer.CALL_OFF


def why_in_vain(machine: Coordinator, ranks: Collection[int]) -> str:
    """Why new processes for `ranks`, of lost nodes, would not help; empty: they would, or it is not known yet."""
    counted = [rank for rank in ranks if machine.reports.get(rank) is not None]
    if counted:
        return f"{rank_list(counted)} had come out of the training before the node was lost, and the others count on it"
    if machine.phase is not Phase.CUT or set(machine.missing) - set(ranks):
        return ""
    reports: dict[int, Report | None] = {**machine.reports, **dict.fromkeys(ranks)}
    return decide(reports, world_size=machine.world_size).refusal


def keepers(num_nodes: int, node: int | None = None) -> tuple[int, ...]:
    """The nodes whose agents keep the small records of the ranks of `node`: two others, the first one among them, so
    that the loss of two nodes of which one is the first leaves no rank without. `node` None: all that keep some."""
    some = tuple(range(min(num_nodes, _NUM_KEEPERS + 1)))
    return some if node is None else tuple(each for each in some if each != node)[:_NUM_KEEPERS]
