"""Who goes on when the store of the rendezvous is lost with its host, and another store stands at its address. Pure.

The agents of a job settle who hosts, and who is out, by notes in the store of the rendezvous (`succession`). When its
host is lost these notes are gone. The same command, started at the same endpoint, hosts a new and empty store; whoever
finds it there asks `deed` what that means. One entry of the new store decides, which only one writer can put in the
place of what it has read: torch's own state of the rendezvous, so that new nodes go by it as well.

- The first survivor *adopts* the store: its nodes are the ones of the rendezvous there, and the entry says for which
  recovery of which meeting (`Adoption`). From then on the notes of the recovery are written there.
- Where new nodes have been faster, and have begun without the survivors, the job has begun anew: the survivors save.
- An agent that has stood still may have been given up by others meanwhile, who may have gone on: it does not adopt,
  and claims nothing. It follows those that have adopted.
- The number of the recovery tells who is behind: an agent that has missed one was given up in it, and is out.
- Nobody is ended by an entry that is older than what it knows itself: it saves, and the job is restarted.

Where it is the old store after all, because its host has only stood still, its notes count as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Adoption", "Deed", "Sight", "deed"]


@dataclass(frozen=True)
class Adoption:
    """Survivors go on in this store."""

    scope: str
    """Of the meeting in which they have got their numbers; see `agent.rendezvous.HostedStoreRendezvous`."""
    generation: int
    """The recovery in which they have adopted it."""


@dataclass(frozen=True)
class Sight:
    """What an agent finds at the endpoint."""

    is_same: bool = False
    """It is the store that this agent has used all the time: its host has only stood still."""
    adoption: Adoption | None = None
    """None: nobody has adopted it, or all have met anew there since."""
    has_begun: bool = False
    """Nodes have met there, and no survivors have adopted it before, or all have met anew since."""


class Deed(Enum):
    """What an agent does that has lost the store."""

    CLAIM = "claim"
    """The notes there count: read them, and write this agent's own if there are none yet."""
    READ = "read"
    """The notes there count, but this agent writes none of its own."""
    ADOPT = "adopt"
    """Adopt it, and look again."""
    WAIT = "wait"
    """Others may adopt it."""
    OUT = "out"
    """The others have given this node up, and have gone on."""
    RESTART = "restart"
    """Save, and meet the others anew."""


def deed(sight: Sight, *, scope: str, generation: int, is_sure: bool) -> Deed:
    """`generation`: the recovery that this agent takes part in. `is_sure`: it cannot have been given up, because it has
    not stood still since it last heard of the others."""
    if sight.is_same:
        return Deed.CLAIM
    if sight.adoption is None:
        if sight.has_begun:
            return Deed.RESTART
        return Deed.ADOPT if is_sure else Deed.WAIT
    if sight.adoption.scope != scope or sight.adoption.generation < generation:
        return Deed.RESTART
    if sight.adoption.generation > generation:
        return Deed.OUT
    return Deed.CLAIM if is_sure else Deed.READ
