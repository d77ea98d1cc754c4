"""The variables of the dynamic cluster: read together, so that all that is wrong is said at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindx_elastic.cluster.messages import MAX_WORKERS, NODE_ID
from mindx_elastic.cluster.table import Limits
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import UsageError

__all__ = ["SCHEDULER", "WORKER", "ClusterSettings"]

SCHEDULER, WORKER = "MS_SCHED", "MS_WORKER"
_OTHER_ROLES = ("MS_PSERVER", "MS_SERVER")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What a process of a dynamic cluster is told from outside."""

    role: str
    """``MS_ROLE``: MS_SCHED or MS_WORKER."""
    size: int
    """``MS_WORKER_NUM``: number of workers."""
    host: str
    """``MS_SCHED_HOST``: where the scheduler listens."""
    port: int
    """``MS_SCHED_PORT``."""
    node_id: str = ""
    """``MS_NODE_ID``; empty: the scheduler gives a name. A number below MS_WORKER_NUM is the rank."""
    recovery: bool = False
    """``MS_ENABLE_RECOVERY``: 1 waits for a process that takes a dead one's place."""
    recovery_path: Path | None = None
    """``MS_RECOVERY_PATH``: folder of the scheduler's table."""
    limits: Limits = field(default_factory=Limits)
    """``MINDX_HEARTBEAT_S``, else ``MS_NODE_TIMEOUT``, and ``MS_TOPO_TIMEOUT``."""
    device: int | None = None
    """``DEVICE_ID``: the device of this process; None: by its order on the machine."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ClusterSettings | None:
        """None: this process is in no dynamic cluster. Raises UsageError that names every wrong or missing variable."""
        reader = _Reader(os.environ if env is None else env)
        if not reader.text("MS_ROLE") and reader.text("MS_WORKER_NUM") in ("", "1"):
            return None
        found = cls(
            role=reader.role(),
            size=reader.number("MS_WORKER_NUM", "the number of workers, the same for all processes", 1, MAX_WORKERS),
            host=reader.needed("MS_SCHED_HOST", "the address at which all workers reach the scheduler's machine"),
            port=reader.number("MS_SCHED_PORT", "a free port of that machine", 1, 65535),
            node_id=reader.node_id(),
            recovery=reader.switch("MS_ENABLE_RECOVERY"),
            recovery_path=Path(path) if (path := reader.text("MS_RECOVERY_PATH")) else None,
            limits=Limits(
                heartbeat_s=reader.seconds(("MINDX_HEARTBEAT_S", "MS_NODE_TIMEOUT"), Limits.heartbeat_s, 0.5, 3600),
                formation_s=reader.seconds(("MS_TOPO_TIMEOUT",), Limits.formation_s, 1, 7 * 86400),
            ),
            device=reader.device(),
        )
        if found.role == SCHEDULER and found.recovery and found.recovery_path is None:
            reader.problems.append(
                "MS_RECOVERY_PATH is not set: with MS_ENABLE_RECOVERY=1 give the scheduler a folder for its table, "
                "MS_RECOVERY_PATH=./recovery"
            )
        if found.role != SCHEDULER and found.node_id == "sched":
            reader.problems.append("MS_NODE_ID=sched is the scheduler's; give each worker its own, or none")
        if reader.problems:
            raise UsageError(f"the dynamic cluster cannot be formed: {'; '.join(reader.problems)}")
        return found


class _Reader:
    """Reads variables and collects what is wrong with them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.problems: list[str] = []

    def text(self, name: str) -> str:
        return self._env.get(name, "").strip()

    def needed(self, name: str, meaning: str) -> str:
        text = self.text(name)
        if not text:
            self.problems.append(f"{name} is not set: give {meaning}")
        elif not text.isprintable() or " " in text:
            self.problems.append(f"{name}={printable(text, 60)!r}: give {meaning}")
        return text

    def role(self) -> str:
        role = self.text("MS_ROLE").upper()
        if role in _OTHER_ROLES:
            self.problems.append(f"MS_ROLE={role}: parameter servers are not supported; give {SCHEDULER} or {WORKER}")
        elif role not in (SCHEDULER, WORKER):
            what = f"MS_ROLE={printable(role, 40)!r}" if role else "MS_ROLE is not set"
            self.problems.append(f"{what}: give {SCHEDULER} to one process and {WORKER} to the others")
        return role

    def device(self) -> int | None:
        if not self.text("DEVICE_ID"):
            return None
        return self.number("DEVICE_ID", "the number of this process's device", 0, 1 << 16)

    def number(self, name: str, meaning: str, low: int, high: int) -> int:
        text = self.text(name)
        if text.isascii() and text.isdecimal() and len(text) < 12 and low <= int(text) <= high:
            return int(text)
        what = f"{name}={printable(text, 40)!r}" if text else f"{name} is not set"
        self.problems.append(f"{what}: give {meaning}, {low} to {high}")
        return low

    def seconds(self, names: tuple[str, ...], default: float, low: float, high: float) -> float:
        """The first of `names` that is set."""
        name = next((each for each in names if self.text(each)), "")
        if not name:
            return default
        try:
            value = float(self.text(name))
        except ValueError:
            value = -1.0
        if low <= value <= high:
            return value
        self.problems.append(f"{name}={printable(self.text(name), 40)!r}: give seconds, {low:g} to {high:g}")
        return default

    def switch(self, name: str) -> bool:
        text = self.text(name)
        if text not in ("", "0", "1"):
            self.problems.append(f"{name}={printable(text, 40)!r}: give 1, 0 or nothing")
        return text == "1"

    def node_id(self) -> str:
        text = self.text("MS_NODE_ID")
        if text and not re.fullmatch(NODE_ID, text):
            self.problems.append(
                f"MS_NODE_ID={printable(text, 40)!r}: give a name of up to 128 letters, digits and ._:@- "
                "that begins with a letter or digit"
            )
        return text
