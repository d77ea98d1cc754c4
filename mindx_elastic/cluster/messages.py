"""What the members of a job and the table of them (`cluster.table`) say to each other. Pure.

A member is a worker that was started by hand, with one rank, or the agent of a node, with all the ranks of that.

============  =================================  ======================================================================
member says   what                               then
============  =================================  ======================================================================
`Register`    who it is, and where it stands     `Welcome`, `Refused` or `Dead`; `Group`, when all are there
`Beat`        it lives                           `Beat`
`Farewell`    how it ends                        `Noted`, and the connection is closed
============  =================================  ======================================================================

It is told besides: `News` (of its group), `Over` (the job is).

Each is a JSON object with ``op``; `parse` makes nothing of a message but these classes, whose fields say what may be in
them (`core.fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from mindx_elastic.core.fields import Between, Text, Words, read
from mindx_elastic.core.pace import Pace, SlowRank

__all__ = [
    "MAX_WORKERS",
    "NODE_ID",
    "Beat",
    "Count",
    "Dead",
    "Farewell",
    "Generation",
    "Group",
    "How",
    "Identity",
    "Incarnation",
    "Message",
    "Name",
    "News",
    "NodeId",
    "Noted",
    "Over",
    "Port",
    "Rank",
    "Refused",
    "Register",
    "Welcome",
    "Why",
    "as_json",
    "parse",
]

MAX_WORKERS = 100_000
NODE_ID = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}"

NodeId = Annotated[str, Text(128, NODE_ID)]
Incarnation = Annotated[str, Text(32, "[A-Za-z0-9]{32}")]
"""A random name that no other process has."""
Name = Annotated[str, Text(300)]
Port = Annotated[int, Between(1, 65535)]
Generation = Annotated[int, Between(-1, 1 << 30)]
Rank = Annotated[int, Between(0, MAX_WORKERS - 1)]
Count = Annotated[int, Between(0, MAX_WORKERS)]
Why = Annotated[str, Words(2000)]
How: TypeAlias = Literal["done", "left", "away", "failed"]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which process it is."""

    host: Annotated[str, Words(100)]
    pid: Annotated[int, Between(0, 1 << 22)]
    space: Name
    """Equal for processes that can see each other's process ids; empty where that is not known."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class Register:
    """All that the table must know of a member: said over each new connection, and when it changes."""

    process: Identity
    incarnation: Incarnation
    """Another one for each group that it wants to be in."""
    node_id: Annotated[str, Text(128, f"({NODE_ID})?")]
    """As the user has named it, or the table; empty: the table gives a name."""
    size: Count = 0
    """Members of the job, as a worker was told; 0: an agent, for which the table's own number counts."""
    recovery: bool = True
    store: tuple[Name, Port]
    """Address and port of one that it hosts, for the group in which it is the first."""
    job: Name = ""
    """Of the table that has admitted it; empty: a new member."""
    run_id: Name = ""
    """``--rdzv-id``."""
    ranks: Annotated[int, Between(1, MAX_WORKERS)] = 1
    """That it brings."""
    role: Name = ""
    """``--role``."""
    restarts: Annotated[int, Between(0, 1 << 30)] = 0
    """How many it has counted."""
    why: Why = ""
    """What has ended its part of the group before."""
    generation: Generation = -1
    """Of the group that it is in."""
    has_finished: bool = False
    """Its ranks have, and it waits for the others' end."""


@dataclass(frozen=True)
class Beat:
    """The worker lives."""

    paces: tuple[Pace, ...] = ()
    """Of an agent's ranks."""
    slow: tuple[SlowRank, ...] = ()
    """From the table: the ranks that the others wait for."""


@dataclass(frozen=True)
class Farewell:
    """The member ends."""

    how: How
    """Its training is finished; it was stopped with its state saved; it comes back in place; it has failed."""
    code: Annotated[int, Between(0, 255)]
    why: Why


@dataclass(frozen=True)
class Welcome:
    """The member has a place."""

    job: Name
    node_id: NodeId
    heartbeat_s: Annotated[float, Between(0.1, 86400)]
    """The table's counts for all."""


@dataclass(frozen=True)
class Refused:
    """The member is not admitted."""

    why: Why
    over: Annotated[int, Between(0, 255)] | None = None
    """The job is; its code, as in `Over`. Of an agent also 2: its command line does not fit the job's."""
    wait_s: Annotated[float, Between(0, 3600)] = 0.0
    """Its place may be free after so long."""


@dataclass(frozen=True)
class Dead:
    """The member is held for dead."""

    why: Why


@dataclass(frozen=True)
class Noted:
    """The member's farewell is in the table, also for a scheduler that is started again."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A formed group, as one of its members sees it."""

    generation: Generation
    """How often the table has formed one before."""
    node: Rank = 0
    """The member's number; a worker's is its rank."""
    nodes: Count = 1
    rank: Rank
    """The first that the member brings."""
    size: Annotated[int, Between(1, MAX_WORKERS)]
    """Of the world."""
    role_rank: Rank = 0
    role_size: Count = 1
    """Of all ranks with the member's role."""
    local_rank: Rank = 0
    local_size: Count = 1
    """Among the members on its machine."""
    restarts: Annotated[int, Between(0, 1 << 30)] = 0
    """The most that a member has counted."""
    host: Name
    """Of the group's store."""
    port: Port


@dataclass(frozen=True)
class News:
    """Of the group that was formed last: told when members begin or cease to wait, or are gone."""

    waiting: Count
    """How many want to be in the next group, and have room there: new ones, and those whose part of this one is over.
    """
    missing: tuple[Rank, ...]
    """The numbers of members that are not in the group any more."""
    why: Why
    """What became of the first of them."""
    failed: bool = False
    """It is dead, or its part of the group has failed."""


@dataclass(frozen=True)
class Over:
    """The job is."""

    code: Annotated[int, Between(0, 255)]
    """0: all training is finished; that of a member that was stopped; 1: it has failed."""
    why: Why
    rank: Rank | None = None
    """The member whose death has ended it; None: of none."""


Message: TypeAlias = Register | Beat | Farewell | Welcome | Refused | Dead | Noted | Group | News | Over
_KINDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in Message.__args__}


def as_json(message: Message) -> dict[str, Any]:
    """`message` as `parse` takes it."""
    return {"op": type(message).__name__.lower(), **{name: _plain(each) for name, each in vars(message).items()}}


def _plain(value: Any) -> Any:
    """Without the deep copy of `dataclasses.asdict`."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return vars(value) if isinstance(value, Identity | Pace | SlowRank) else value


def parse(content: object) -> Message:
    """The message in a JSON object. Raises ValueError for anything else."""
    op = content.get("op") if isinstance(content, Mapping) else None
    if not isinstance(op, str) or op not in _KINDS:
        raise ValueError("it says what is not known")
    return read(_KINDS[op], content)
