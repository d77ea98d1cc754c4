"""A survivor that stays while the job goes on with fewer ranks: it has left its guard, and waits for its new rank.

A place that cannot be filled ends a recovery in place. The agent then writes, beside the reason, which survivors are to
go on and as which ranks (`Keeps`). Each of them saves its boundary and leaves its guard, as for a restart, but does not
end: it writes a file with the exit code that it would have had, and waits for another one, with the environment of its
new rank. To the agent a process that waits has ended, and the one that goes on is a start of the next attempt. Whatever
does not fit ends it after all, with that exit code, and the job is restarted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.core.posix import read_json_object

__all__ = ["Keeps", "Order", "note_path", "order_path", "wait_for_order", "write_file"]

_LOOK_S = 0.005


@dataclass(frozen=True)
class Keeps:
    """Who stays, and as which rank."""

    size: int
    """Ranks from then on."""
    ranks: Mapping[int, int]
    """New ranks by old ones."""

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "ranks": {str(old): new for old, new in self.ranks.items()}}

    @classmethod
    def from_json(cls, content: Any) -> Keeps | None:
        """None: it is no such thing."""
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            ranks = {int(old): int(new) for old, new in content["ranks"].items()}
            if ranks and sorted(ranks.values()) == list(range(int(content["size"]))):
                return cls(len(ranks), ranks)
        return None


@dataclass(frozen=True)
class Order:
    """What a process that waits is told."""

    env: Mapping[str, str]
    """Of its new rank."""
    stdout: str
    """The file that it goes on writing to; empty: where it has written to so far."""
    stderr: str


def note_path(folder: Path, pid: int) -> Path:
    """There once the process waits: its exit code, were it to end."""
    return folder / f"waits_{pid}.json"


def order_path(folder: Path, pid: int) -> Path:
    """What the process is told."""
    return folder / f"goes_on_{pid}.json"


def write_file(path: Path, content: Mapping[str, Any]) -> None:
    """At once, or not at all. Raises OSError."""
    temp = path.with_suffix(f".{os.getpid()}")
    temp.write_text(json.dumps(content))
    temp.replace(path)


def wait_for_order(folder: Path, code: int, timeout_s: float) -> Order | None:
    """Wait, with the guard left; None: end with `code`. Main thread. Raises OSError."""
    pid, deadline = os.getpid(), time.monotonic() + timeout_s
    write_file(note_path(folder, pid), {"code": code})
    path = order_path(folder, pid)
    while time.monotonic() < deadline:
        if path.exists():
            content = read_json_object(path)
            path.unlink()
            if "env" not in content:
                return None
            env = {str(name): str(value) for name, value in content["env"].items()}
            return Order(env, str(content.get("stdout", "")), str(content.get("stderr", "")))
        time.sleep(_LOOK_S)
    return None
