"""The variables of the dynamic cluster: read together, so that all that is wrong is said at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.cluster.messages import MAX_WORKERS, NODE_ID
from mindx_elastic.cluster.table import Limits
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import UsageError

__all__ = ["SCHEDULER", "WORKER", "ClusterSettings"]

SCHEDULER, WORKER = "MS_SCHED", "MS_WORKER"
_ROLES = f"{SCHEDULER} to one process and {WORKER} to the others; parameter servers are not supported"
_SIZES = f"the number of workers, the same for all processes, 1 to {MAX_WORKERS}"
_HOSTS = "the address at which all workers reach the scheduler's machine"
_DEVICES = "the number of this process's device, 0 to 65536"
_NAMES = "a name of up to 128 letters, digits and ._:@- that begins with a letter or digit"
_WEEK_S = 7 * 86400
_NEEDED = object()


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
        read = reader.read
        if not reader.text("MS_ROLE") and reader.text("MS_WORKER_NUM") in ("", "1"):
            return None
        heartbeat = "MINDX_HEARTBEAT_S" if reader.text("MINDX_HEARTBEAT_S") else "MS_NODE_TIMEOUT"
        found = cls(
            role=read("MS_ROLE", _one_of({SCHEDULER: SCHEDULER, WORKER: WORKER}), _ROLES),
            size=read("MS_WORKER_NUM", _number(int, 1, MAX_WORKERS), _SIZES),
            host=read("MS_SCHED_HOST", _matching(r"[^\s\x00-\x1f\x7f]+"), _HOSTS),
            port=read("MS_SCHED_PORT", _number(int, 1, 65535), "a free port of that machine, 1 to 65535"),
            node_id=read("MS_NODE_ID", _matching(NODE_ID), _NAMES, default=""),
            recovery=read("MS_ENABLE_RECOVERY", _one_of({"1": True, "0": False}), "1, 0 or nothing", default=False),
            recovery_path=read("MS_RECOVERY_PATH", Path, "a folder", default=None),
            limits=Limits(
                heartbeat_s=read(heartbeat, _number(float, 0.5, 3600), "seconds, 0.5 to 3600", Limits.heartbeat_s),
                formation_s=read(
                    "MS_TOPO_TIMEOUT", _number(float, 1, _WEEK_S), f"seconds, 1 to {_WEEK_S}", Limits.formation_s
                ),
            ),
            device=read("DEVICE_ID", _number(int, 0, 1 << 16), _DEVICES, default=None),
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

    def read(self, name: str, parse: Callable[[str], Any], meaning: str, default: Any = _NEEDED) -> Any:
        """What `parse` makes of the variable; a ValueError of it is a problem, and `meaning` says what to give."""
        text = self.text(name)
        if not text and default is not _NEEDED:
            return default
        try:
            return parse(text)
        except ValueError:
            what = f"{name}={printable(text, 40)!r}" if text else f"{name} is not set"
            self.problems.append(f"{what}: give {meaning}")
            return default


def _number(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not re.fullmatch(r"[0-9][0-9.e]*", text):  # Python's own take "1_0" and digits of other scripts, too
            raise ValueError
        if not low <= (value := kind(text)) <= high:
            raise ValueError
        return value

    return parse


def _one_of(values: Mapping[str, Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text.upper() not in values:
            raise ValueError
        return values[text.upper()]

    return parse


def _matching(pattern: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return parse
