"""``mindx-elastic pause`` and ``resume``: all ranks of a job wait at one boundary, and go on.

A command writes its order into the agent's private folder and calls the ranks of its node; they agree with those of the
other nodes (`guard.pausing`) and say on their pages where they stand. So the pages are all that is known here, also of
a pause that was given on another node. A rank that has not passed the order on is called again at each look: it may
not have entered its guard yet.

::

    {agent folder}/pause.json     the newest order, until its command has ended

The folder has mode 700, so only the agent's own user can pause the job.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mindx_elastic.cli.common import (
    EXIT_BAD,
    EXIT_NOTHING,
    RUN_DIR,
    RunDirArgument,
    agent_in_words,
    fail,
    find_runs,
    is_running,
)
from mindx_elastic.core.posix import answered_by, is_private_folder, read_json_object, start_ticks
from mindx_elastic.core.printable import printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.status_page import Status, WorkerPhase, read_pages, who_waits, why_gone_on
from mindx_elastic.memory.agent_folder import CONTROL_SIGNAL, PAUSE, PAUSE_FILE
from mindx_elastic.memory.folders import MAKER_FILE

if TYPE_CHECKING:
    from mindx_elastic.agent.history import AgentRun

__all__ = ["PauseAnswer", "PauseOrder", "pause_command", "resume_command"]

_POLL_S = 0.02
_TAKE_BACK_S = 30.0
_GUARDED = (WorkerPhase.TRAINING, WorkerPhase.BETWEEN)


def pause_command(
    path: RunDirArgument = RUN_DIR,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Wait this long for every rank to come."),
    ] = 300.0,
) -> None:
    """Let all ranks of a running job wait at one step, until resume.

    Every rank of every node waits after the same step, which is printed. The processes live on and keep their memory,
    on GPUs too; nothing is written to disk. A stop (SIGTERM, a fault) and a failure work as always: the step is saved.
    A rank that is in a long step or an evaluation is waited for. If one does not come in time, the pause is taken back.

    Give it on one node of the job, where its agent runs. It needs a job under mindx-elastic run whose script has a
    guard. After a restart the new attempt is not paused.

    \b
    [bold]Exit code[/bold]
    0  every rank waits (also when the job was paused already)
    1  not paused, and the line says why: training goes on, stops, or has finished
    2  wrong usage, for example no such RUN_DIR
    3  no agent runs there

    \b
    [bold]Examples[/bold]
    mindx-elastic pause mindx-run
    mindx-elastic pause mindx-run --timeout 60 && nvidia-smi && mindx-elastic resume mindx-run
    """
    _command("pause", path, timeout)


def resume_command(
    path: RunDirArgument = RUN_DIR,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Wait this long for the ranks to go on."),
    ] = 60.0,
) -> None:
    """Let a paused job go on.

    A pause that is still being agreed on is taken back.

    \b
    [bold]Exit code[/bold]
    0  no rank of this node waits (also when the job was not paused)
    1  a rank has not gone on in time
    2  wrong usage, for example no such RUN_DIR
    3  no agent runs there

    \b
    [bold]Examples[/bold]
    mindx-elastic resume mindx-run
    """
    _command("resume", path, timeout)


def _command(kind: str, path: Path, timeout_s: float) -> None:
    run = _find_run(path)
    folder = Path(run.agent_dir)
    _check_folder(folder, run)
    order = PauseOrder(folder, kind, f"mindx-elastic {kind}")
    try:
        # A closed terminal and a SIGTERM must not leave ranks that are to wait, and no one who knows of it.
        with answered_by(signal.default_int_handler, (signal.SIGTERM, signal.SIGHUP)):
            answer = order.answer_at_once() or _carry_out(order, run, timeout_s)
    except KeyboardInterrupt:
        if kind == "pause":
            _take_back(folder, run, "its command was interrupted")
        typer.echo("interrupted; training goes on" if kind == "pause" else "interrupted", err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        if folder.exists() and is_running(run):
            fail(f"{folder}: the ranks cannot be asked: {error.strerror or error}")
        _end(EXIT_BAD, f"{'not paused: ' if kind == 'pause' else ''}{_how_it_ended(path, run)}")
    if kind == "pause" and not answer.good:
        _take_back(folder, run, answer.text)
        answer = replace(answer, text=f"not paused: {answer.text}")
    if not answer.good:
        _end(EXIT_BAD, answer.text)
    typer.echo(printable(answer.text))
    if kind == "pause":
        typer.echo(printable(f"to go on: mindx-elastic resume {path}"))


def _carry_out(order: PauseOrder, run: AgentRun, timeout_s: float) -> PauseAnswer:
    """Raises OSError where the agent or its folder is gone."""
    end = time.monotonic() + timeout_s
    order.give()
    try:
        while (answer := order.look()) is None and time.monotonic() < end:
            if not is_running(run):
                raise ProcessLookupError(f"the agent {run.pid} is gone")
            time.sleep(_POLL_S)
        return answer or PauseAnswer(False, order.why_late(timeout_s))
    finally:
        order.withdraw()


def _take_back(folder: Path, run: AgentRun, why: str) -> None:
    """No command waits for the pause any more: it must not come about later."""
    with suppress(OSError):  # else the job has ended
        _carry_out(PauseOrder(folder, "resume", f"the pause was taken back: {why}"), run, _TAKE_BACK_S)


def _find_run(path: Path) -> AgentRun:
    """The newest agent of this machine that runs there; ends the command where none does."""
    runs = find_runs(path)
    if not runs:
        _end(EXIT_NOTHING, f"no agent has run in {path}: a job can be paused under mindx-elastic run only")
    for run in reversed(runs):
        if is_running(run) and run.agent_dir:
            return run
    _end(EXIT_NOTHING, f"no agent runs in {path} on this machine: {_how_it_ended(path, runs[-1])}")


def _how_it_ended(path: Path, run: AgentRun) -> str:
    """What the log says of an agent that ran a moment ago."""
    found = [each for each in find_runs(path) if each.pid == run.pid]
    run = found[-1] if found else run
    return agent_in_words(run, is_running(run))


def _check_folder(folder: Path, run: AgentRun) -> None:
    """The folder is the agent's own, and this user's: its path comes out of a file that others may write."""
    if folder.exists() and not is_private_folder(folder):
        fail(f"{folder} is not this user's: give the command as the user who has started the job")
    try:
        identity = read_json_object(folder / MAKER_FILE)
    except (OSError, ValueError) as error:
        fail(f"{folder}: the agent's folder cannot be used: {error}")
    if identity.get("pid") != run.pid or identity.get("started") != start_ticks(run.pid or 0):
        fail(f"{folder} is not the folder of agent {run.pid}")


def _end(code: int, text: str) -> NoReturn:
    typer.echo(f"mindx-elastic: {printable(text)}", err=True)
    raise typer.Exit(code)


# --- the order ---


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
        statuses = read_pages(self._folder)
        self._newest = _newest(statuses)
        """The newest order that a rank knew before this one."""
        self._step = max((status.paused_step for status in statuses.values()), default=-1)

    def answer_at_once(self) -> PauseAnswer | None:
        """Where nothing need be ordered."""
        statuses = read_pages(self._folder)
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
        statuses = read_pages(self._folder)
        late = [rank for rank, status in sorted(statuses.items()) if self._is_needed_by(status)]
        for rank in late:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(statuses[rank].pid, CONTROL_SIGNAL)
        return self._look_at_pause(statuses) if self._kind == PAUSE else self._look_at_resume(statuses, late)

    def why_late(self, timeout_s: float) -> str:
        """Who does not do as it says, when the time is over."""
        statuses = read_pages(self._folder)
        if self._kind == PAUSE:
            who = _who_is_missing(statuses)
            return f"{who} in {timeout_s:g} s; the pause is taken back and training goes on"
        ranks = [r for r, status in sorted(statuses.items()) if status.pause_order % 2 or self._is_needed_by(status)]
        return f"{rank_list(ranks)} did not go on; the watcher does not answer"

    # --- parts --------------------------------------------------------------------------------------------------------

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
