"""The rank table ``hccl.json``: which rank runs on which server and device (all its values are strings).

``{"status": "completed", "version": "1.0", "server_count": "2", "server_list": [{"server_id": "node-a", "host_ip": ...,
"container_ip": ..., "device": [{"device_id": "0", "device_ip": ..., "rank_id": "0"}]}]}``

Where there is no such file, torchrun's environment tells which ranks share a node. Either way the answer is a
`NodeMap`: a dead node is the death of all its ranks.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.files import parse_json_object, read_json_object, whole_number

__all__ = [
    "NodeMap",
    "RankTable",
    "Server",
    "nodes_from_rank_table",
    "nodes_from_torchrun",
    "parse_rank_table",
    "read_rank_table",
]

_MAX_WORLD_SIZE = 1 << 20


@dataclass(frozen=True)
class Server:
    """One node."""

    server_id: str
    host_ip: str
    """Empty where the table has none."""
    ranks: frozenset[int]
    container_ip: str = ""
    """Address of the pod; empty where the table has none."""

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that a report may call it."""
        return tuple(dict.fromkeys(name for name in (self.server_id, self.host_ip, self.container_ip) if name))


@dataclass(frozen=True)
class RankTable:
    """The whole job, as far as the platform has placed it."""

    completed: bool
    """False while the platform still fills it in (``"status": "initializing"``)."""
    servers: tuple[Server, ...]

    @property
    def ranks(self) -> frozenset[int]:
        """Every rank of the table."""
        return frozenset(rank for server in self.servers for rank in server.ranks)

    def server_of(self, rank: int) -> Server | None:
        """The node that runs `rank`; None when the table does not have it."""
        return next((server for server in self.servers if rank in server.ranks), None)


def parse_rank_table(text: str) -> RankTable:
    """Raises ValueError, with what is wrong, for anything but a rank table."""
    return _rank_table(parse_json_object(text))


def read_rank_table(path: Path) -> RankTable:
    """Read the table from a file, links followed (the platform's mounts are links).

    Raises OSError where there is none, ValueError for a half-written file or one that is no rank table.
    """
    return _rank_table(read_json_object(path))


def _rank_table(content: dict[str, Any]) -> RankTable:
    if "server_list" not in content and "status" not in content:
        raise ValueError('is no rank table; expected {"status": ..., "server_list": [...]}')
    listed = content.get("server_list", [])
    if not isinstance(listed, list):
        raise ValueError(f"has a server_list that is no list but {listed!r:.80}")
    servers = tuple(_server(item) for item in listed)
    seen: set[int] = set()
    for server in servers:
        if seen & server.ranks:
            raise ValueError(f"names rank {min(seen & server.ranks)} twice")
        seen |= server.ranks
    return RankTable(content.get("status") == "completed", servers)


def _server(item: Any) -> Server:
    devices = item.get("device", []) if isinstance(item, dict) else None
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise ValueError(f"has a server that is not understood: {item!r:.80}")
    ranks = set()
    for device in devices:
        rank = whole_number(device.get("rank_id"))
        if rank is None:
            raise ValueError(f"has a device without a usable rank_id: {device!r:.80}")
        ranks.add(rank)
    server_id, host_ip, container_ip = (_name(item.get(key)) for key in ("server_id", "host_ip", "container_ip"))
    return Server(server_id, host_ip, frozenset(ranks), container_ip)


def _name(value: Any) -> str:
    return str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


@dataclass(frozen=True)
class NodeMap:
    """Which ranks run on which node."""

    ranks_of: Mapping[str, Collection[int]]
    """By name; a node may have several names."""

    def find(self, name: str) -> frozenset[int] | None:
        """All ranks of the node; None: the job has no such node."""
        found = self.ranks_of.get(name.strip())
        return None if found is None else frozenset(found)

    def ranks(self, name: str) -> frozenset[int]:
        """All ranks of the node. Raises UsageError, with the names that there are, for an unknown one."""
        found = self.find(name)
        if found is not None:
            return found
        near = difflib.get_close_matches(name[:100], list(self.ranks_of)[:10_000], 1)
        shown = ", ".join(list(self.ranks_of)[:8]) + (", ..." if len(self.ranks_of) > 8 else "")
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"the job has no node {name!r:.100}; {hint}its nodes: {shown or 'none'}")


def nodes_from_rank_table(table: RankTable) -> NodeMap:
    """Each server under its ``server_id``, ``host_ip`` and ``container_ip``.

    Two entries with one name are two pods on one machine: the name stands for both. Raises UsageError for a table that
    is not complete yet.
    """
    if not table.completed:
        raise UsageError(
            'the rank table is not complete: its status is not "completed" yet, so the ranks of a node are not known; '
            "wait until the platform has filled it in"
        )
    ranks_of: dict[str, frozenset[int]] = {}
    for server in table.servers:
        for name in server.names:
            ranks_of[name] = ranks_of.get(name, frozenset()) | server.ranks
    return NodeMap(ranks_of)


def nodes_from_torchrun(env: Mapping[str, str]) -> NodeMap | None:
    """Node k has the ranks from ``k * LOCAL_WORLD_SIZE``; its names are ``k`` and ``node k``.

    None where the variables are not set. Raises UsageError where they contradict each other, or where the nodes have
    different numbers of ranks (then the environment of one node does not tell those of the others).
    """
    if not env.get("WORLD_SIZE", "").strip() or not env.get("LOCAL_WORLD_SIZE", "").strip():
        return None
    world_size, per_node = _variable(env, "WORLD_SIZE"), _variable(env, "LOCAL_WORLD_SIZE")
    if not 1 <= per_node <= world_size <= _MAX_WORLD_SIZE:
        raise UsageError(
            f"environment variables LOCAL_WORLD_SIZE={per_node} and WORLD_SIZE={world_size}: expected "
            f"1 <= LOCAL_WORLD_SIZE <= WORLD_SIZE <= {_MAX_WORLD_SIZE}"
        )
    uneven = world_size % per_node != 0
    if not uneven and env.get("GROUP_RANK", "").strip():
        group = _variable(env, "GROUP_RANK")
        uneven = group >= world_size // per_node
        if env.get("RANK", "").strip():
            uneven |= _variable(env, "RANK") // per_node != group
    if uneven:
        raise UsageError(
            f"environment variables WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={per_node}, "
            f"GROUP_RANK={env.get('GROUP_RANK', '')!r:.20}: the nodes have different numbers of ranks, so the ranks of "
            "a node are not known; give a rank table (MINDX_RANK_TABLE) or name the ranks themselves"
        )
    ranks_of: dict[str, range] = {}
    for node in range(world_size // per_node):
        ranks_of[str(node)] = ranks_of[f"node {node}"] = range(node * per_node, (node + 1) * per_node)
    return NodeMap(ranks_of)


def _variable(env: Mapping[str, str], name: str) -> int:
    value = whole_number(env.get(name, ""))
    if value is None:
        raise UsageError(f"environment variable {name}={env.get(name, '')!r:.40} is no whole number from 0")
    return value
