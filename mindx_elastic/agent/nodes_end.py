"""What the end of the other nodes means for a node whose ranks have finished their training (`farewell`).

A node that is lost there takes what its ranks had still to save with it. The job has finished if the end of the
training is complete on disk all the same; else it has failed, and is restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.farewell import FINISHED, LOST, Farewell, NodeEnd, wait_for_all
from mindx_elastic.agent.holder import flush, newest_on_disk
from mindx_elastic.agent.inbox import SignalInbox
from mindx_elastic.agent.node_watch import NodeWatch
from mindx_elastic.agent.rendezvous import Membership
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed
from mindx_elastic.core.status_page import Status

__all__ = ["Signs", "end_together"]


@dataclass(frozen=True)
class Signs:
    """Of life, from the other nodes."""

    node: int
    """This one."""
    nodes: NodeWatch | None
    """The connections between the agents; None: there are none."""
    membership: Membership | None
    """The heartbeats in the rendezvous."""

    def missing(self) -> dict[int, str]:
        """The nodes that give none, and the words for it. A connection counts for more than a heartbeat."""
        silent = set[int]() if self.membership is None else set(self.membership.missing) - {self.node}
        found = {node: f"node {node} gives no sign of life" for node in silent}
        if self.nodes is None:
            return found
        found = {node: words for node, words in found.items() if node not in self.nodes.heard}
        return found | self.nodes.lost | {gone.node: gone.words for gone in self.nodes.gone()}


def end_together(
    own: Ending,
    statuses: Sequence[Status],
    farewell: Farewell,
    signs: Signs,
    *,
    inbox: SignalInbox,
    new_store: Callable[[], Any | None],
    directories: Collection[Path],
    world_size: int,
    timeout_s: float,
) -> Ending:
    """How the attempt has ended for all nodes. Main thread; waits for the other nodes.

    own: how it has ended here. statuses: the last pages of this node's ranks. new_store: see `wait_for_all`.
    directories: the checkpoint directories of this node's ranks, as far as they are known.
    """
    ends: dict[int, NodeEnd] = {}
    with suppress(SignalException), inbox.interrupting():
        ends = wait_for_all(farewell, signs.missing, new_store, timeout_s)
    again = {node: end for node, end in ends.items() if end.again}
    if again:
        node, end = min(again.items())
        outcome = "failed" if end.outcome == "failed" else "membership"
        return Ending(outcome=outcome, code=EXIT_TEMPORARY, cause=f"node {node}: {end.cause}", elsewhere=True)
    lacking = {node: end for node, end in sorted(ends.items()) if end.outcome != FINISHED}
    ending = own
    if lacking:
        step = max((status.step for status in statuses), default=-1)
        for arena in sorted({Path(status.arena) for status in statuses if status.arena}):
            for line in flush(arena).lines:
                logger.info("from memory to disk: %s", line)
        ending = _end_without(own, lacking, farewell, directories=directories, step=step, world_size=world_size)
    if ending.outcome == FINISHED:
        with suppress(SignalException), inbox.interrupting():
            farewell.leave([node for node, end in ends.items() if end.outcome == FINISHED])
    return ending


def _end_without(
    own: Ending,
    lacking: Mapping[int, NodeEnd],
    farewell: Farewell,
    *,
    directories: Collection[Path],
    step: int,
    world_size: int,
) -> Ending:
    """Nodes are lost, or have left, before their ranks had ended. `step`: the last one of the training; -1: no guard
    tells it."""
    causes = "; ".join(_words(node, end, own=farewell.node) for node, end in lacking.items())
    is_known = step >= 0 and bool(directories)
    newest = newest_on_disk(directories, world_size) if is_known else None
    is_whole = farewell.settle(not is_known or (newest is not None and newest >= step))
    if is_whole and [*lacking] == [farewell.node]:
        return own  # the others had given it up, which does no harm
    where = ", ".join(sorted(map(str, directories))) or "the checkpoint directory"
    end = f"step {step}, the end of the training, is" if step >= 0 else "the end of the training is"
    if not is_whole:
        cause = f"{causes}; {end} not complete in {where}"
        return Ending(outcome="failed", code=EXIT_TEMPORARY, cause=cause, elsewhere=True)
    which = f"node{'s' * (len(lacking) > 1)} {listed([str(node) for node in lacking], 8)}"
    what = f"{end} complete in {where}, but " if is_known else ""
    return replace(own, cause=f"{causes}; {what}what {which} did behind it (an export, say) may be missing")


def _words(node: int, end: NodeEnd, *, own: int) -> str:
    if node == own:
        return "this node was taken for lost when its training ended"
    return end.cause if end.outcome == LOST else f"node {node} has {end.outcome} ({end.cause})"
