"""``RUN_DIR/result.json``: how the job ended, for the script that has started the agent.

::

    {
      "version": 1,
      "outcome": "stopped",
      "exit_code": 143,
      "reason": "SIGTERM",
      "saved_step": 1200,
      "progressed": true,
      "retry": true,
      "fruitless": 0,
      "attempts": 1,
      "time": 1764000000.0,
      "host": "node7",
      "pid": 4711
    }

The exit code alone does not say whether another start is worth it: a job that is stopped before its first step, each
time (a time limit that is too short, an endpoint that always says stop), leaves with 143 for ever. So a few such runs
in a row are the last: `FRUITLESS_MOST`.

An agent takes away the file of the run before when it starts, and writes its own when it ends. There is none while it
runs, and after a SIGKILL. The file appears whole or not at all, one key a line, so that ``grep '"retry": true'`` does
where there is no JSON reader.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated

from mindx_elastic.agent.history import FINISHED, AttemptRecord
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY, EXIT_USAGE
from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import Text, Words, read
from mindx_elastic.core.posix import read_json_object
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import SaveError, UsageError
from mindx_elastic.platforms.small_files import write_whole

__all__ = ["FRUITLESS_MOST", "RESULT_FILE", "JobResult", "ResultFile", "RunProgress", "find_progress", "read_result"]

RESULT_FILE = "result.json"
FRUITLESS_MOST = 3
"""So many runs in a row that were stopped without progress are the last that are worth another start."""
_VERSION = 1
_WORTH_IT = frozenset({EXIT_TEMPORARY, 129, 130, 137, 138, 143})
"""Failures that another start may cure: another node's, and ends by signals that come from outside."""
_MAX_REASON = 2000


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The content of the file."""

    outcome: Annotated[str, Text(20, "finished|stopped|failed|usage")]
    """``finished``, ``stopped`` (gracefully, by request), ``failed``, ``usage`` (nothing was started)."""
    exit_code: int
    """The agent's."""
    reason: Annotated[str, Words(_MAX_REASON)] = ""
    """Why it did not finish, for a person."""
    saved_step: int | None = None
    """Newest step that the next start can go on from, as far as the agent knows; None: it knows of none."""
    progressed: bool | None = None
    """Whether the job got further than where this agent began; None: not known (no guard was entered)."""
    retry: bool
    """Whether the same command is worth another start."""
    fruitless: int = 0
    """How many runs in a row, this one included, ended without known progress."""
    attempts: int = 0
    """How often the workers were started."""
    time: float = 0.0
    """Unix seconds."""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class RunProgress:
    """What a run's attempts have come to."""

    saved_step: int | None = None
    progressed: bool | None = None
    attempts: int = 0


def find_progress(records: Sequence[AttemptRecord], in_memory: int = -1) -> RunProgress:
    """From the attempts of one agent, the oldest first. `in_memory`: the newest step of which the disk had no room."""
    began = next((r.resumed_step for r in records if r.resumed_step is not None), None)
    # Of the last attempt that knows one: a checkpoint may have been set aside meanwhile.
    newest = next((max(steps) for record in reversed(records) if (steps := _safe_steps(record))), -1)
    newest = max(newest, in_memory)
    reached = newest
    if records and records[-1].outcome == FINISHED:
        reached = max(newest, records[-1].step_reached or 0)
    progressed = None if began is None else reached > max(0, began)
    return RunProgress(newest if newest >= 0 else None, progressed, len(records))


def _safe_steps(record: AttemptRecord) -> list[int]:
    return [step for step in (record.saved_step, record.resumed_step) if step is not None]


def read_result(run_dir: Path) -> JobResult | None:
    """What the last agent has left in `run_dir`; None: there is no such file, or none that an agent has written. Never
    raises for what it holds."""
    try:
        content = read_json_object(run_dir / RESULT_FILE)
        found = read(JobResult, content)
    except (OSError, ValueError, RecursionError):
        return None
    return found if content.get("version") == _VERSION else None


class ResultFile:
    """Around an agent's whole life: what leaves the block decides, unless `write` was called before."""

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._before = 0
        self._written = False

    def open(self, run_dir: Path) -> None:
        """The run directory is known. Takes away the file of the run before."""
        found = read_result(run_dir)
        self._before = 0 if found is None else found.fruitless
        self._run_dir = run_dir
        try:
            (run_dir / RESULT_FILE).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s of the run before cannot be removed (%s)", run_dir / RESULT_FILE, error.strerror)

    def write(
        self,
        outcome: str,
        exit_code: int,
        reason: str = "",
        progress: RunProgress | None = None,
        *,
        final: bool = False,
    ) -> None:
        """The job has ended so. Only the first call counts; without a run directory none does.

        final: the end cannot be cured by another start, whatever the exit code says.
        """
        if self._run_dir is None or self._written:
            return
        self._written = True
        progress = progress or RunProgress()
        fruitless = self._before
        if outcome != "usage":
            fruitless = 0 if outcome == "finished" or progress.progressed else fruitless + 1
        may = {"stopped": exit_code != 0, "failed": exit_code in _WORTH_IT}.get(outcome, False)
        result = JobResult(
            outcome=outcome,
            exit_code=exit_code,
            reason=printable(reason, _MAX_REASON),
            saved_step=progress.saved_step,
            progressed=progress.progressed,
            retry=may and not final and fruitless < FRUITLESS_MOST,
            fruitless=fruitless,
            attempts=progress.attempts,
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        content = json.dumps({"version": _VERSION, **asdict(result)}, indent=2) + "\n"
        try:
            write_whole(self._run_dir / RESULT_FILE, content.encode())
        except SaveError as error:
            logger.error("%s; the exit code %d is all that tells how the job ended", error, exit_code)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UsageError):
            self.write("usage", EXIT_USAGE, str(error))
        elif isinstance(error, SystemExit):
            self.write("usage", EXIT_USAGE, "wrong usage; the agent's output says more")
        elif error is not None:
            self.write("failed", 1, f"an error of the agent ({type(error).__name__}: {error})")
