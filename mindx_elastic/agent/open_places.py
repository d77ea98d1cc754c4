"""The places of lost nodes that the first node's agent offers in a recovery, one after the other, until each is taken.

An offer is in the store of the rendezvous (`vacancies`), where agents that wait look for it; who has taken the place
says so on the board of the recovery (``{g}/taken/{node}``, see `lost_nodes`). With that the lost node's ranks are noted
to be dead, and the recovery goes on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mindx_elastic.agent.lifeline import Gone
from mindx_elastic.agent.node_watch import NodeWatch
from mindx_elastic.agent.recovery import Generation, Notes
from mindx_elastic.agent.vacancies import Vacancy
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.rejoin.lost_node import why_in_vain
from mindx_elastic.rejoin.protocol import Coordinator

__all__ = ["OpenPlaces", "tell_records"]

_LOOK_S = 0.05
_LONGEST = 300


@dataclass
class _Open:
    """A place that is offered, will be, or was taken."""

    place: Vacancy
    gone: Gone
    taken_by: str = ""


class OpenPlaces:
    """Of one attempt; those of the newest recovery in which there are some. Main thread. What asks a store raises
    `recovery.ERRORS`."""

    def __init__(
        self, nodes: NodeWatch, machine: Coordinator, timeout_s: float, call_off: Callable[[str], None]
    ) -> None:
        """`timeout_s`: how long another node is waited for. `call_off`: the recovery, for this reason."""
        self._nodes, self._machine, self._timeout_s, self._call_off = nodes, machine, timeout_s, call_off
        self._opens: list[_Open] = []
        self._look_due = 0.0

    @property
    def generation(self) -> int:
        """The recovery in which they are open; 0: none was."""
        return self._opens[-1].place.generation if self._opens else 0

    @property
    def lost(self) -> list[int]:
        """The nodes whose places they are."""
        return [each.place.node for each in self._opens]

    def is_open(self, node: int) -> bool:
        """It has a place in the recovery under way, and nobody has taken it."""
        return self.generation == self._machine.generation and any(
            each.place.node == node and not each.taken_by for each in self._opens
        )

    def is_taken(self, node: int) -> bool:
        return any(each.taken_by and each.place.node == node for each in self._opens)

    def open(self, gone: Gone, like: Vacancy, now: Generation, board: Notes) -> None:
        """The place of a lost node can be taken in the recovery under way, behind those that are open already. `like`:
        see `node_watch.first_place`."""
        generation = self._machine.generation
        place = replace(
            like,
            name=secrets.token_hex(8),
            node=gone.node,
            ranks=len(gone.ranks),
            first=gone.ranks[0],
            generation=generation,
        )
        self._opens = [each for each in self._opens if each.place.generation == generation]
        is_next = all(each.taken_by for each in self._opens)
        if not self._opens:
            now.node, now.deadline = "", time.monotonic() + self._timeout_s
        now.node = "; ".join(filter(None, (now.node, gone.name)))
        self._opens.append(_Open(place, gone))
        board.write(f"{generation}/open", {"node": gone.node, "name": gone.name})
        if is_next:
            self._nodes.offer(place)
        logger.warning(
            "the other nodes' ranks wait up to %.0f s for another node in the place of node %d (--rejoin-timeout): "
            "start the same command there",
            max(0.0, now.deadline - time.monotonic()),
            gone.node,
        )

    def why_late(self) -> str:
        """What has not come, when the time of the recovery is over; empty: nobody is waited for here."""
        free = [each.place.node for each in self._opens if not each.taken_by]
        if not free or self.generation != self._machine.generation:
            return ""
        return f"no other node has taken the place of node {free[0]} within {self._timeout_s:g} s (--rejoin-timeout)"

    def look(self, now: Generation, board: Notes) -> None:
        """Has an agent taken one?"""
        free = [each for each in self._opens if not each.taken_by]
        moment, machine = time.monotonic(), self._machine
        is_late = moment > now.deadline
        if not free or (moment < self._look_due and not is_late):
            return
        self._look_due = moment + _LOOK_S
        mine, place = free[0], free[0].place
        key = f"{place.generation}/taken/{place.node}"
        note = board.read([key]).get(key)
        if note is None:
            if reason := why_in_vain(machine, [rank for each in free for rank in each.gone.ranks]):
                self._call_off(reason)
            elif is_late:
                self._call_off(self.why_late())
            return
        assert self._nodes.host is not None
        mine.taken_by = printable(str(note["name"]), _LONGEST)
        now.taken_by = "; ".join(filter(None, (now.taken_by, mine.taken_by)))
        self._nodes.host.expect(place.node, str(note["token"])[:64])
        logger.warning("%s has taken the place of node %d (%s)", mine.taken_by, place.node, mine.gone.name)
        tell_records(self._nodes, board, place.generation, mine.gone.ranks)
        for rank in mine.gone.ranks:
            found = board.write(f"{place.generation}/out/{rank}", {"dead": True})
            if not found.get("dead"):
                self._call_off(f"rank {rank} has died during the recovery")
        if len(free) > 1:
            self._nodes.offer(free[1].place)
            return
        now.deadline = moment + self._timeout_s
        self.withdraw(keeps=True)

    def withdraw(self, *, keeps: bool = False) -> None:
        """There is no place to take any more. `keeps`: it stays known who has taken them. Never raises."""
        if not self._opens:
            return
        with suppress(Exception):  # any of torch's; who takes it then finds the recovery over, or its store gone
            self._nodes.offer(None)
        if not keeps:
            self._opens = []


def tell_records(nodes: NodeWatch, board: Notes, generation: int, ranks: Sequence[int]) -> None:
    """What has come to this node of the small records of lost ranks."""
    for rank in ranks:
        if nodes.host is not None and (kept := nodes.host.records_of(rank)) is not None:
            board.write(f"{generation}/records/{rank}/{nodes.node}", kept)
