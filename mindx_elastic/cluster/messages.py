"""What workers and the scheduler of a dynamic cluster say to each other. Pure.

============  =================================  ======================================================================
worker says   what                               then
============  =================================  ======================================================================
`Register`    who it is, and where its store is  `Welcome`, `Refused` or `Dead`; `Group`, when all are there
`Beat`        it lives                           nothing
`Farewell`    how it ends                        `Noted`, and the connection is closed
============  =================================  ======================================================================

The scheduler says besides: `Death` (of another rank), `Fail` (the job is over). Each is a JSON object with ``op``;
`parse` makes nothing of a message but these classes, whose fields say what may be in them (`core.fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from mindx_elastic.core.fields import Between, Text, Words, read

__all__ = [
    "MAX_WORKERS",
    "NODE_ID",
    "Beat",
    "Dead",
    "Death",
    "Fail",
    "Farewell",
    "Generation",
    "Group",
    "How",
    "Identity",
    "Incarnation",
    "Message",
    "Name",
    "NodeId",
    "Noted",
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
    """A worker has connected."""

    process: Identity
    incarnation: Incarnation
    node_id: Annotated[str, Text(128, f"({NODE_ID})?")]
    """As the user has named it; empty: the scheduler gives a name."""
    size: Annotated[int, Between(1, MAX_WORKERS)]
    recovery: bool
    store: tuple[Name, Port]
    """Address and port of one that it hosts, for the group in which it is rank 0."""
    job: Name = ""
    """Of the scheduler that has admitted it; empty: a new process."""


@dataclass(frozen=True)
class Beat:
    """The worker lives."""


@dataclass(frozen=True)
class Farewell:
    """The worker ends."""

    how: How
    """Its training is finished; it was stopped with its state saved; it comes back in place; it has failed."""
    code: Annotated[int, Between(0, 255)]
    why: Why


@dataclass(frozen=True)
class Welcome:
    """The worker has a place."""

    job: Name
    node_id: NodeId
    heartbeat_s: Annotated[float, Between(0.1, 86400)]
    """The scheduler's counts for all."""


@dataclass(frozen=True)
class Refused:
    """The worker is not admitted."""

    why: Why
    is_over: bool = False
    """The job is."""
    wait_s: Annotated[float, Between(0, 3600)] = 0.0
    """Its place may be free after so long."""


@dataclass(frozen=True)
class Dead:
    """The scheduler holds the worker for dead."""

    why: Why


@dataclass(frozen=True)
class Noted:
    """The worker's farewell is in the table, also for a scheduler that is started again."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A formed group, as one of its ranks sees it."""

    generation: Generation
    """How often all processes of the job have started over."""
    rank: Rank
    size: Annotated[int, Between(1, MAX_WORKERS)]
    local_rank: Rank
    local_size: Annotated[int, Between(1, MAX_WORKERS)]
    host: Name
    """Of the group's store."""
    port: Port


@dataclass(frozen=True)
class Death:
    """A rank of the group that was formed last has died."""

    rank: Rank
    why: Why


@dataclass(frozen=True)
class Fail:
    """The job is over."""

    why: Why
    rank: Rank | None = None
    """Whose death has ended it; None: of none."""


Message: TypeAlias = Register | Beat | Farewell | Welcome | Refused | Dead | Noted | Group | Death | Fail
_KINDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in Message.__args__}


def as_json(message: Message) -> dict[str, Any]:
    """`message` as `parse` takes it."""
    return {"op": type(message).__name__.lower(), **asdict(message)}


def parse(content: object) -> Message:
    """The message in a JSON object. Raises ValueError for anything else."""
    op = content.get("op") if isinstance(content, Mapping) else None
    if not isinstance(op, str) or op not in _KINDS:
        raise ValueError("it says what is not known")
    return read(_KINDS[op], content)
