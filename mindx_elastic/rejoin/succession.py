"""Who hosts the board after the first node is lost, and which other nodes are lost with it. Pure.

The first node's agent hosts the workers' store and says which nodes are lost. When it is lost itself, another agent
*succeeds* it. No agents vote: there is one note for each recovery in the store of the rendezvous (a `Claim`), which
only its first writer can write, and all read the same one.

- An agent that loses the first node writes its own address there, as the one that hosts the next board. All others
  that lose the first node read that, and come to it.
- The first node's agent writes there which nodes it has lost, before it offers their places. So it cannot have lost
  a node that has succeeded it, and the other way round.
- An agent that cannot go on in place writes why, and the job is restarted.

Who is named as lost is out, alive or not. A first node's agent that finds somebody else's claim is out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Assembly", "Claim", "Meaning", "Standing", "assemble", "keepers", "meaning"]

_NUM_KEEPERS = 2
_LONGEST = 300
_MOST_CHARS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The note about one recovery. Exactly one of `refusal` and a host."""

    node: int
    """Of the agent that has written it."""
    refusal: str = ""
    """Why the job is restarted."""
    address: str = ""
    port: int = 0
    """Of the workers' store that its agent hosts from now on; 0: it is the first node already."""
    lifeline: int = 0
    lost: tuple[int, ...] = field(default=())
    """The nodes that the first node's agent has lost."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes | str) -> Claim:
        """Raises ValueError, KeyError, TypeError, RecursionError for anything else."""
        content = json.loads(text[:_MOST_CHARS])
        found = cls(
            node=int(content["node"]),
            refusal=str(content["refusal"])[:_LONGEST],
            address=str(content["address"])[:_LONGEST],
            port=int(content["port"]),
            lifeline=int(content["lifeline"]),
            lost=tuple(int(node) for node in content["lost"]),
        )
        if found.node < 0 or not all(0 <= port < 1 << 16 for port in (found.port, found.lifeline)):
            raise ValueError(f"a claim of node {found.node} with port {found.port}")
        return found


class Meaning(Enum):
    """Of a claim, to an agent that has lost the first node."""

    HOSTS = "hosts"
    """This agent hosts the board now."""
    FOLLOWS = "follows"
    """Another one does."""
    OUT = "out"
    """The first node's agent has lost this node."""
    RESTART = "restart"


def meaning(claim: Claim, *, node: int, first: int) -> Meaning:
    """`node`: of the agent that reads. `first`: the node that was the first one before."""
    if claim.refusal:
        return Meaning.RESTART
    if node in claim.lost and claim.node != node:
        return Meaning.OUT
    if claim.node == first or not claim.port:  # it is lost while another node's loss is recovered
        return Meaning.RESTART
    return Meaning.HOSTS if claim.node == node else Meaning.FOLLOWS


@dataclass(frozen=True)
class Standing:
    """What an agent that has come to the new host says of itself."""

    generation: int
    """The recovery that it takes part in."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Standing:
        """Raises ValueError, KeyError, TypeError."""
        return cls(int(content["generation"]))


@dataclass(frozen=True)
class Assembly:
    """What the new host does next."""

    is_complete: bool = False
    lost: tuple[int, ...] = ()
    """Once it is complete: the nodes that are lost."""
    refusal: str = ""


def assemble(
    num_nodes: int, generation: int, said: Mapping[int, Standing], *, first: int, node: int, is_late: bool
) -> Assembly:
    """`said`: by the agents that have come, without the host's own. `first`: the node that is lost for sure. `node`:
    the host's. is_late: the others need not be waited for any longer: they are lost, too."""
    wrong = [other for other, standing in sorted(said.items()) if standing.generation != generation]
    if wrong:
        return Assembly(refusal=f"node {wrong[0]} has not seen the same recoveries as node {node}")
    if first in said:
        return Assembly(refusal=f"node {first} is lost, and has come")
    missing = tuple(other for other in range(num_nodes) if other != node and other not in said)
    if set(missing) != {first} and not is_late:
        return Assembly()
    return Assembly(True, missing)


def keepers(first: int, num_nodes: int, node: int | None = None) -> tuple[int, ...]:
    """The nodes whose agents keep the small records of the ranks of `node`: two others, the first one among them, so
    that the loss of two nodes of which one is the first leaves no rank without. `node` None: all that keep some."""
    some = [(first + number) % num_nodes for number in range(min(num_nodes, _NUM_KEEPERS + 1))]
    return tuple(some) if node is None else tuple(each for each in some if each != node)[:_NUM_KEEPERS]
