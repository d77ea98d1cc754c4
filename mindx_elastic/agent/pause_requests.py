"""What `mindx-elastic pause` and `resume` write into the agent's private folder, and what the agent answers.

::

    {agent folder}/pause-{id}.request     of the command: what, for how long it waits
    {agent folder}/pause-{id}.answer      of the agent; the command removes it

The folder has mode 700, so only the agent's own user can ask. Both files appear whole. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mindx_elastic.core.posix import read_json_object
from mindx_elastic.memory.agent_folder import PAUSE, RESUME

__all__ = ["Answer", "PauseRequest", "answer", "ask", "read_answer", "take_requests", "withdraw"]

_NAME = re.compile(r"pause-([0-9a-f]{16})\.request")
_MOST_S = 1e9


@dataclass(frozen=True)
class PauseRequest:
    """One command that waits for its answer."""

    id: str
    kind: str
    """`PAUSE` or `RESUME`."""
    timeout_s: float


@dataclass(frozen=True)
class Answer:
    """How a command has ended."""

    good: bool
    """It is as the command wants it."""
    text: str
    """One line for the user."""
    step: int | None = None
    """Where the ranks wait, or have waited."""


def ask(folder: Path, kind: str, timeout_s: float) -> PauseRequest:
    """The command's side. Raises OSError."""
    request = PauseRequest(secrets.token_hex(8), kind, timeout_s)
    content = {"kind": kind, "timeout_s": timeout_s}
    _write(_path(folder, request.id, "request"), json.dumps(content))
    return request


def withdraw(folder: Path, request: PauseRequest) -> bool:
    """The command's side: False where the agent has taken the request already."""
    try:
        _path(folder, request.id, "request").unlink()
    except OSError:
        return False
    return True


def read_answer(folder: Path, request: PauseRequest) -> Answer | None:
    """The command's side: the answer, which is removed; None: there is none yet."""
    path = _path(folder, request.id, "answer")
    try:
        content = read_json_object(path)
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        path.unlink()
    step = content.get("step")
    return Answer(content.get("good") is True, str(content.get("text")), step if type(step) is int else None)


def take_requests(folder: Path) -> list[PauseRequest]:
    """The agent's side: the new requests, which are removed; those that make no sense are dropped."""
    found = []
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            path = folder / name
            with suppress(OSError, ValueError):
                content = read_json_object(path)
                path.unlink()  # a command that has withdrawn it gets no answer
                kind, timeout_s = content.get("kind"), content.get("timeout_s")
                if kind in (PAUSE, RESUME) and isinstance(timeout_s, (int, float)) and math.isfinite(timeout_s):
                    found.append(PauseRequest(match[1], str(kind), min(max(0.0, float(timeout_s)), _MOST_S)))
    return found


def answer(folder: Path, request: PauseRequest, content: Answer) -> None:
    """The agent's side. Raises OSError."""
    _write(_path(folder, request.id, "answer"), json.dumps(asdict(content)))


def _path(folder: Path, name: str, suffix: str) -> Path:
    return folder / f"pause-{name}.{suffix}"


def _write(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    temp.write_text(text)
    os.replace(temp, path)
