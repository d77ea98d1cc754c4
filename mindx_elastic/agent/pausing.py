"""`mindx-elastic pause` and `resume`: what the commands order, and what the workers' pages say of it.

A command writes its order into the agent's private folder and calls the ranks of its node; they agree with those of the
other nodes (`guard.pausing`) and say on their pages where they stand. So the pages are all that is known here, also of
a pause that was given on another node. A rank that has not passed the order on is called again at each look: it may
not have entered its guard yet.

::

    {agent folder}/pause.json     the newest order, until its command has ended

The folder has mode 700, so only the agent's own user can pause the job. Imports no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.core.posix import read_json_object
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.status_page import Status, WorkerPhase, read_pages
from mindx_elastic.memory.agent_folder import CONTROL_SIGNAL, PAUSE, PAUSE_FILE

__all__ = ["PauseAnswer", "PauseOrder", "who_waits", "why_gone_on"]

_GUARDED = (WorkerPhase.TRAINING, WorkerPhase.BETWEEN)
_BY_COMMAND = "mindx-elastic pause"


@dataclass(frozen=True)
class PauseAnswer:
    """How a command has ended."""

    good: bool
    """It is as the command wants it."""
    text: str
    """One line for the user."""


class PauseOrder:
    """One command's order, in the process of the command."""

    def __init__(self, folder: Path, kind: str, reason: str) -> None:
        """`folder`: the agent's. `kind`: `PAUSE` or `RESUME`. `reason`: in the words of the ranks' logs."""
        self._folder, self._kind, self._reason = folder, kind, reason
        self._number = 0
        statuses = self._statuses()
        self._newest = _newest(statuses)
        """The newest order that a rank knew before this one."""
        self._step = max((status.paused_step for status in statuses.values()), default=-1)

    def answer_at_once(self) -> PauseAnswer | None:
        """Where nothing need be ordered."""
        statuses = self._statuses()
        if self._kind != PAUSE:
            is_clear = not _any_pauses(statuses) and not (self._folder / PAUSE_FILE).exists()
            return PauseAnswer(True, "the run is not paused; nothing to do") if is_clear else None
        if not who_waits(statuses):
            return None
        since_ns = max(status.paused_ns for status in statuses.values())
        seconds = (time.monotonic_ns() - since_ns) / 1e9
        return PauseAnswer(True, f"paused at step {self._step} already, for {seconds:.0f} s")

    def give(self) -> None:
        """Have the order lie there for the ranks. Raises OSError."""
        self._number = time.monotonic_ns()
        temp = self._folder / f".{PAUSE_FILE}.{os.getpid()}"
        temp.write_text(json.dumps({"kind": self._kind, "reason": self._reason, "seq": self._number}))
        os.replace(temp, self._folder / PAUSE_FILE)

    def withdraw(self) -> None:
        """Its command has ended: a rank that comes later has nothing to hear. Never raises."""
        with suppress(OSError, ValueError):
            if self._lies_there()["seq"] == self._number:
                (self._folder / PAUSE_FILE).unlink()

    def look(self) -> PauseAnswer | None:
        """Call the ranks that have not heard it. How it has ended; None: it has not. Raises OSError."""
        try:
            found = self._lies_there()
        except (OSError, ValueError):  # the agent has taken it away: the workers of another attempt are being started
            self.give()
            return None
        if found["kind"] != self._kind:
            return PauseAnswer(False, "another command was given meanwhile")
        self._number = found["seq"]
        statuses = self._statuses()
        late = [rank for rank, status in sorted(statuses.items()) if self._is_needed_by(status)]
        for rank in late:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(statuses[rank].pid, CONTROL_SIGNAL)
        return self._look_at_pause(statuses) if self._kind == PAUSE else self._look_at_resume(statuses, late)

    def why_late(self, timeout_s: float) -> str:
        """Who does not do as it says, when the time is over."""
        statuses = self._statuses()
        if self._kind == PAUSE:
            who = _who_is_missing(statuses)
            return f"{who} in {timeout_s:g} s; the pause is taken back and training goes on"
        ranks = [r for r, status in sorted(statuses.items()) if status.pause_order % 2 or self._is_needed_by(status)]
        return f"{rank_list(ranks)} did not go on; the watcher does not answer"

    # --- parts --------------------------------------------------------------------------------------------------------

    def _statuses(self) -> dict[int, Status]:
        return read_pages(self._folder)

    def _lies_there(self) -> Mapping[str, Any]:
        return read_json_object(self._folder / PAUSE_FILE)

    def _is_needed_by(self, status: Status) -> bool:
        return status.phase in _GUARDED and status.pause_heard != self._number

    def _look_at_pause(self, statuses: Mapping[int, Status]) -> PauseAnswer | None:
        if who_waits(statuses):
            step = max(status.paused_step for status in statuses.values())
            return PauseAnswer(True, f"paused at step {step}: every rank waits")
        stopping = [rank for rank, status in statuses.items() if status.phase == WorkerPhase.STOPPING]
        finished = [rank for rank, status in statuses.items() if status.finished]
        if finished:
            rank = min(finished)
            return PauseAnswer(False, f"the training has finished (rank {rank}, step {statuses[rank].step})")
        if stopping:
            return PauseAnswer(False, f"rank {min(stopping)} stops ({statuses[min(stopping)].reason or 'an alarm'})")
        if _newest(statuses) > self._newest and not _any_pauses(statuses):
            return PauseAnswer(
                False, why_gone_on(statuses) or "the ranks have gone on, because they stop or were replaced"
            )
        return None

    def _look_at_resume(self, statuses: Mapping[int, Status], late: Sequence[int]) -> PauseAnswer | None:
        if late or _any_pauses(statuses):  # one that has not heard it may just be passing on a pause
            return None
        where = f" from step {self._step}" if self._step >= 0 else ""
        return PauseAnswer(True, f"training goes on{where}")


def who_waits(statuses: Mapping[int, Status]) -> int:
    """The number of the pause in which every rank of the job waits; 0: not every rank does. `statuses`: the pages of
    this node's ranks."""
    orders = {status.all_paused for status in statuses.values() if status.phase in _GUARDED}
    return orders.pop() if len(orders) == 1 else 0


def why_gone_on(statuses: Mapping[int, Status]) -> str:
    """Why the ranks wait no longer, as they say it; empty: they do not."""
    gone_on = [status for status in statuses.values() if status.pause_order and not status.pause_order % 2]
    return "; ".join(sorted({status.pause_reason for status in gone_on} - {"", _BY_COMMAND}))


def _any_pauses(statuses: Mapping[int, Status]) -> bool:
    return any(status.pause_order % 2 for status in statuses.values() if status.phase in _GUARDED)


def _newest(statuses: Mapping[int, Status]) -> int:
    return max((status.pause_order for status in statuses.values()), default=0)


def _who_is_missing(statuses: Mapping[int, Status]) -> str:
    late = [rank for rank, status in sorted(statuses.items()) if not status.paused_ns]
    if late:
        return f"{rank_list(late)} did not come to a boundary"
    if not statuses:
        return "no rank of this node has entered a mindx_elastic guard"
    return "ranks of other nodes, or without a mindx_elastic guard, did not come to the boundary"
