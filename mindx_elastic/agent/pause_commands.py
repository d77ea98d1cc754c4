"""`mindx-elastic pause` and `resume` on one node: what the commands write into the agent's private folder, and how the
agent takes them up, tells the workers and answers.

::

    {agent folder}/pause-{id}.request     of the command: what, for how long it waits
    {agent folder}/pause-{id}.answer      of the agent; the command removes it

The folder has mode 700, so only the agent's own user can ask. Both files appear whole. What is to be done is decided in
`pausing`. A worker that has not heard an order is told again at each look: it may not have entered its guard yet when
it was told before. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mindx_elastic.agent.pausing import Answer, Order, PauseRequest, PauseWatch
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.posix import read_json_object
from mindx_elastic.core.status_page import Status
from mindx_elastic.memory.agent_folder import PAUSE, RESUME, AgentFolder

if TYPE_CHECKING:
    from mindx_elastic.agent.workers import Workers

__all__ = ["PauseDesk", "ask", "read_answer", "take_requests", "withdraw"]

_NAME = re.compile(r"pause-([0-9a-f]{16})\.request")
_MOST_S = 1e9
_BUSY_S = 0.05


class PauseDesk:
    """One per agent. Main thread."""

    def __init__(self, folder: AgentFolder, events: EventLog, note_pause: Callable[[float], None]) -> None:
        """`note_pause` is told for how many seconds every rank has waited, once they go on."""
        self._folder, self._events, self._note_pause = folder, events, note_pause
        self._watch = PauseWatch()
        self._written: Order | None = None

    def end_attempt(self, number: int, cause: str) -> None:
        """All workers have ended."""
        self._written = None
        self._end(f"attempt {number} has ended ({cause or 'the job has finished'})")

    def look(self, workers: Workers, *, stopping: bool) -> float:
        """Do what is due. Returns in how many seconds to look again, at most; 0: with the next usual look."""
        now = time.monotonic()
        for request in take_requests(self._folder.path):
            self._watch.ask(request, now)
        if stopping:
            self._end("the job is stopping")
            return 0.0
        statuses = workers.statuses()
        order = self._watch.look(statuses, len(workers.live), now)
        if order is not None:
            self._give(order, workers, statuses)
        self._hand_out()
        return _BUSY_S if self._watch.is_busy else 0.0

    def _give(self, order: Order, workers: Workers, statuses: dict[int, Status]) -> None:
        if order is not self._written:
            try:
                number = self._folder.order(order.kind, order.reason, grace_s=0.0, exit_code=0)
            except OSError as error:
                logger.warning("%s: no order can be written (%s); trying again", self._folder.path, error)
                return
            self._watch.note_written(number)
            self._written = order
        for rank, status in statuses.items():
            if self._watch.needs(status):
                workers.call(rank)

    def _end(self, why: str) -> None:
        self._watch.end(why, time.monotonic())
        self._hand_out()

    def _hand_out(self) -> None:
        for change in self._watch.changes:
            if change.begins:
                self._events.emit("pause", step=change.step, duration_s=change.seconds)
                logger.warning("paused at step %d: every rank waits until mindx-elastic resume", change.step)
            else:
                self._events.emit("pause_end", step=change.step, reason=change.why, duration_s=change.seconds)
                self._note_pause(change.seconds)
                logger.info("the pause at step %d has ended after %.1f s: %s", change.step, change.seconds, change.why)
        self._watch.changes.clear()
        for request, content in self._watch.answers:
            with suppress(OSError):  # the command may have gone; the log has it
                _answer(self._folder.path, request, content)
        self._watch.answers.clear()


# --- the files ---


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


def _answer(folder: Path, request: PauseRequest, content: Answer) -> None:
    """The agent's side. Raises OSError."""
    _write(_path(folder, request.id, "answer"), json.dumps(asdict(content)))


def _path(folder: Path, name: str, suffix: str) -> Path:
    return folder / f"pause-{name}.{suffix}"


def _write(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    temp.write_text(text)
    os.replace(temp, path)
