"""Which ranks run on which node: from a rank table, or from torchrun's environment. A dead node kills all its ranks.

The rank table is HCCL's ``hccl.json`` in the form of ``ranktable_file_path`` in MindCluster's manual; all its values
are texts:

``{"status": "completed", "version": "1.0", "server_count": "2", "server_list": [{"server_id": "node-a", "host_ip": ...,
"container_ip": ..., "device": [{"device_id": "0", "device_ip": ..., "rank_id": "0"}]}]}``
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.config import FaultPaths
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.config_map import parse_json_object, read_text, whole_number
from mindx_elastic.platforms.small_files import named_errors

__all__ = ["NodeMap", "default_node_map", "nodes_from_torchrun", "parse_rank_table", "read_node_map"]

_MAX_WORLD_SIZE = 1 << 20
_NAMES = ("server_id", "host_ip", "container_ip")
"""Everything that a report may call a server; host_ip and container_ip are often missing."""


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


def read_node_map(rank_table: Path) -> NodeMap:
    """The nodes of a rank table, links followed. Raises UsageError, with the path, for one that is missing, malformed
    or not complete."""
    with named_errors(rank_table, "rank table"):
        return parse_rank_table(read_text(rank_table)[0])


def parse_rank_table(text: str) -> NodeMap:
    """Each server under its ``server_id``, ``host_ip`` and ``container_ip``.

    Two entries with one name are two pods on one machine: the name stands for both. Raises ValueError, with what is
    wrong, for anything but a rank table, and for one that is not complete.
    """
    content = parse_json_object(text)
    listed = content.get("server_list", [])
    if "server_list" not in content and "status" not in content:
        raise ValueError('is no rank table; expected {"status": ..., "server_list": [...]}')
    if not isinstance(listed, list):
        raise ValueError(f"has a server_list that is no list but {listed!r:.80}")
    ranks_of: dict[str, frozenset[int]] = {}
    seen: set[int] = set()
    for server in listed:
        ranks = _ranks_of_server(server)
        if seen & ranks:
            raise ValueError(f"names rank {min(seen & ranks)} twice")
        seen |= ranks
        for name in filter(None, dict.fromkeys(_name(server.get(key)) for key in _NAMES)):
            ranks_of[name] = ranks_of.get(name, frozenset()) | ranks
    if content.get("status") != "completed":
        raise ValueError(
            'is not complete: its status is not "completed" yet, so the ranks of a node are not known; wait until the '
            "platform has filled it in"
        )
    return NodeMap(ranks_of)


def _ranks_of_server(server: Any) -> frozenset[int]:
    devices = server.get("device", []) if isinstance(server, dict) else None
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise ValueError(f"has a server that is not understood: {server!r:.80}")
    ranks = set()
    for device in devices:
        rank = whole_number(device.get("rank_id"))
        if rank is None:
            raise ValueError(f"has a device without a usable rank_id: {device!r:.80}")
        ranks.add(rank)
    return frozenset(ranks)


def _name(value: Any) -> str:
    return str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def default_node_map(env: Mapping[str, str] | None = None) -> NodeMap | None:
    """From the rank table (``MINDX_RANK_TABLE``, ``RANK_TABLE_FILE``) if one is named, else from torchrun's
    environment; None: neither is there. Raises UsageError where that which is there cannot be used."""
    env = os.environ if env is None else env
    table = FaultPaths.from_env(env).rank_table
    return nodes_from_torchrun(env) if table is None else read_node_map(table)


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
