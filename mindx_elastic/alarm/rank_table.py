"""The rank table ``hccl.json``: which rank runs on which server and device (FACTS 1; all its values are strings).

``{"status": "completed", "version": "1.0", "server_count": "2", "server_list": [{"server_id": "node-a", "host_ip": ...,
"device": [{"device_id": "0", "device_ip": ..., "rank_id": "0"}]}]}``
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.alarm.platform_files import parse_json_object, read_json_object, whole_number

__all__ = ["RankTable", "Server", "parse_rank_table", "read_rank_table"]


@dataclass(frozen=True)
class Server:
    """One node."""

    server_id: str
    host_ip: str
    """Empty where the table has none."""
    ranks: frozenset[int]


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
    return Server(str(item.get("server_id", "")), str(item.get("host_ip", "")), frozenset(ranks))
