"""``mindx-elastic top``: a job live in the terminal."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from mindx_elastic.cli.common import find_runs, make_console
from mindx_elastic.cli.possible_loss import DiskWatch, Rates, expect
from mindx_elastic.cli.scripts import interruptible
from mindx_elastic.cli.status_report import make_report, read_pages
from mindx_elastic.cli.watch_frame import draw_frame
from mindx_elastic.core.printable import printable

if TYPE_CHECKING:
    from mindx_elastic.agent.run_log import AgentRun

__all__ = ["Look", "print_frame", "watch"]

_TAIL_BYTES = 1 << 17
_MOST_ALARMS = 3


def watch(path: Path, interval_s: float) -> None:
    """Show the newest agent's job in RUN_DIR until that agent has ended, or Ctrl-C. Waits for the first agent that runs
    there. Into a pipe or a file, and in a terminal that can do nothing, one frame.

    The terminal is as it was when this returns or is left by SIGTERM or SIGHUP. Main thread.
    """
    look = Look(path)
    console = make_console()
    try:
        first = _wait_for_agent(path, look, interval_s)
        is_live = sys.stdout.isatty() and not console.is_dumb_terminal
        print_frame(console, _show_live(console, look, first, interval_s) if is_live else first, look.run)
    except KeyboardInterrupt:
        pass


def _wait_for_agent(path: Path, look: Look, interval_s: float) -> dict[str, Any]:
    told = False
    while True:
        # The folder of a job that is about to be started may not be there yet.
        first = look.take() if os.path.lexists(path) else None
        if first is not None:
            return first
        if not told:
            told = True
            line = f"no agent has run in {path} yet; waiting for one, Ctrl-C ends this"
            typer.echo(f"mindx-elastic: {printable(line)}", err=True)
        time.sleep(interval_s)


class Look:
    """Reads everything that a frame shows. The log is read again only when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rates, self._disk = Rates(), DiskWatch()
        self._log_state: object = None
        self._runs: list[AgentRun] = []

    @property
    def run(self) -> AgentRun:
        """The newest, once `take` has found one."""
        return self._runs[-1]

    def take(self) -> dict[str, Any] | None:
        """The document of `status`, with `rates`, `outlook` and `alarms`; None where no agent has run."""
        from mindx_elastic.core.events import EVENTS_FILE

        log = self._path / EVENTS_FILE if self._path.is_dir() else self._path
        state = _state_of(log)
        if state is None or state != self._log_state:
            self._runs, self._log_state = find_runs(self._path), state
        if not self._runs:
            return None
        run = self._runs[-1]
        report = make_report(self._path, self._runs, now=time.time())
        pages = read_pages(Path(run.agent_dir)) if report["workers"] else {}
        rates = self._rates.update(pages)
        for worker in report["workers"]:
            worker["steps_per_s"] = None if worker["rank"] not in rates else round(rates[worker["rank"]], 3)
        report["time"] = round(time.time(), 3)
        report["outlook"] = asdict(expect(pages, self._disk))
        report["alarms"] = _alarms(log, run)
        return report


def _state_of(log: Path) -> object:
    try:
        status = os.stat(log)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _alarms(log: Path, run: AgentRun) -> list[dict[str, Any]]:
    """The newest notable events of this agent, the oldest first."""
    from mindx_elastic.agent.run_log import NOTABLE
    from mindx_elastic.core.events import lines_backwards, parse_event
    from mindx_elastic.core.values import real, text

    found: list[dict[str, Any]] = []
    for line in lines_backwards(log, _TAIL_BYTES):
        event = parse_event(line)
        if event is None or event["event"] not in NOTABLE:
            continue
        at = real(event.get("time"))
        if at is None or (run.started is not None and at < run.started):
            continue
        found.append({"time": at, "event": event["event"], "reason": text(event.get("reason"))})
        if len(found) == _MOST_ALARMS:
            break
    return found[::-1]


def _is_over(report: dict[str, Any]) -> bool:
    return report["agent"]["running"] is False


def print_frame(console: Console, report: dict[str, Any], run: AgentRun, *, with_clock: bool = True) -> None:
    for line in draw_frame(report, run, width=console.width, height=None, with_clock=with_clock):
        console.print(line, soft_wrap=True)
    sys.stdout.flush()


def _show_live(console: Console, look: Look, report: dict[str, Any], interval_s: float) -> dict[str, Any]:
    """The last report, when the agent has ended."""
    live = Live(console=console, screen=True, auto_refresh=False)
    with interruptible(), live:
        while True:
            size = console.size
            lines = draw_frame(report, look.run, width=size.width, height=size.height)
            live.update(Text("\n").join(lines), refresh=True)
            if _is_over(report):
                return report
            time.sleep(interval_s)
            report = look.take() or report
