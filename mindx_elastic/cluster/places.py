"""The places of a job, and what became of their processes. Pure.

Most members come and go together: what each of them costs must not grow with their number. So a place is found by its
process's incarnation, and the places in each state are counted.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mindx_elastic.cluster import messages
from mindx_elastic.cluster.messages import Register

__all__ = ["IN_GROUP", "MISSED", "Place", "Places", "ProcessState"]


class ProcessState(str, enum.Enum):
    """What became of the process that has a place."""

    WAITING = "waiting"
    """It lives, and waits for the next group."""
    TRAINING = "training"
    """It lives, in the group that was formed last."""
    ENDED = "ended"
    """An agent whose ranks have finished: it lives, and waits for the others' end."""
    DEAD = "dead"
    """It has ended without finishing; its place waits for another process."""
    AWAY = "away"
    """It has said that it comes back in place; else as DEAD."""
    LEFT = "left"
    """It was stopped and has left with its state saved."""
    DONE = "done"
    """Its training is finished."""

    @property
    def lives(self) -> bool:
        """Whether it is heard within the heartbeat."""
        return self is ProcessState.WAITING or self.is_in_group

    @property
    def is_in_group(self) -> bool:
        """Whether it has yet to wait for the next one."""
        return self in IN_GROUP

    @property
    def is_missed(self) -> bool:
        """Whether it is not in the group any more, and the training of its rank is not over."""
        return self in MISSED


IN_GROUP = ProcessState.TRAINING, ProcessState.ENDED
MISSED = ProcessState.WAITING, ProcessState.DEAD, ProcessState.AWAY
_ENDS = {ProcessState.WAITING, ProcessState.DEAD, ProcessState.AWAY, ProcessState.LEFT, ProcessState.DONE}
_NEXT = {
    ProcessState.WAITING: {ProcessState.WAITING, ProcessState.TRAINING, ProcessState.DEAD},
    ProcessState.TRAINING: {ProcessState.ENDED, *_ENDS},
    ProcessState.ENDED: _ENDS,
    ProcessState.DEAD: {ProcessState.WAITING, ProcessState.TRAINING},
    ProcessState.AWAY: {ProcessState.WAITING},
    ProcessState.LEFT: {ProcessState.WAITING},
    ProcessState.DONE: set(),
}


@dataclass(kw_only=True)
class Place:
    """One of the job's members, and its process."""

    node_id: messages.NodeId
    named: bool
    """By the user, not by the table."""
    said: Register
    """By its process."""
    state: ProcessState = ProcessState.WAITING
    rank: messages.Rank | None = None
    """The member's number, a worker's rank."""
    code: int = 0
    """Exit code of a process that has LEFT."""
    why: messages.Why = ""
    """What ended it."""

    def __str__(self) -> str:
        of_worker, of_agent = ("a worker", "rank"), ("an agent", "node")
        alone, kind = of_worker if self.said.size else of_agent
        who = alone if self.rank is None else f"{kind} {self.rank}"
        return f"{who} (node id {self.node_id}, {self.said.process})"

    @property
    def incarnation(self) -> str:
        return self.said.incarnation

    @property
    def machine(self) -> str:
        """Equal for processes on one machine."""
        return self.said.process.space or self.said.process.host


class Places(dict[str, Place]):
    """By node id."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        super().__init__({place.node_id: place for place in places})
        self._by_incarnation = {place.incarnation: place for place in self.values()}
        self._counts = Counter((place.state, place.rank is not None) for place in self.values())

    def find(self, incarnation: str) -> Place | None:
        """The one whose process it is."""
        return self._by_incarnation.get(incarnation)

    def count(self, *states: ProcessState, numbered: bool = False) -> int:
        """How many are in one of these states. `numbered`: of those with a number."""
        return sum(self._counts[state, True] + (not numbered and self._counts[state, False]) for state in states)

    @property
    def num_living(self) -> int:
        return self.count(ProcessState.WAITING, *IN_GROUP)

    def living(self) -> list[Place]:
        return [place for place in self.values() if place.state.lives]

    def waiting(self) -> list[Place]:
        return [place for place in self.values() if place.state is ProcessState.WAITING]

    def members(self) -> list[Place]:
        """Of the group that was formed last, by their numbers."""
        return sorted((place for place in self.values() if place.rank is not None), key=lambda place: place.rank or 0)

    def take(self, place: Place, who: Register) -> None:
        """Its process is now that of `who`, and waits. The place may be new, and its name another one."""
        if place.node_id in self:
            self.move(place, ProcessState.WAITING)
            del self._by_incarnation[place.incarnation]
            place.said, place.why, place.code = who, who.why, 0
        else:
            self._counts[place.state, False] += 1
        if who.node_id not in ("", place.node_id):
            del self[place.node_id]
            place.node_id, place.named = who.node_id, True
        self[place.node_id] = self._by_incarnation[who.incarnation] = place

    def move(self, place: Place, state: ProcessState) -> None:
        assert state in _NEXT[place.state], f"{place} is {place.state.value}, and becomes {state.value}"
        self._counts[place.state, place.rank is not None] -= 1
        self._counts[state, place.rank is not None] += 1
        place.state = state

    def drop(self, place: Place) -> None:
        """Nothing depends on it yet."""
        del self[place.node_id], self._by_incarnation[place.incarnation]
        self._counts[place.state, place.rank is not None] -= 1
