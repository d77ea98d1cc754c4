"""``mindx-elastic pause`` and ``resume``: all ranks of a job wait at one boundary, and go on."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

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
from mindx_elastic.core.posix import answered_by
from mindx_elastic.core.printable import printable

if TYPE_CHECKING:
    from mindx_elastic.agent.history import AgentRun
    from mindx_elastic.agent.pausing import PauseAnswer, PauseOrder

__all__ = ["pause_command", "resume_command"]

_POLL_S = 0.02
_TAKE_BACK_S = 30.0


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
    from mindx_elastic.agent.pausing import PauseOrder

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
    from mindx_elastic.agent.pausing import PauseAnswer

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
    from mindx_elastic.agent.pausing import PauseOrder

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
    from mindx_elastic.core.posix import is_private_folder, read_json_object, start_ticks
    from mindx_elastic.memory.folders import MAKER_FILE

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
