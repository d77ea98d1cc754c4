"""A rehearsal: a stop that the job orders itself, early, to try its own resume on the real machine.

At the place that was asked for the job stops as for SIGTERM (same agreement, save and overlap) and goes on in new
processes, which compare themselves with the old ones and say what it cost. Who starts them:

* the agent, without counting a restart (`agent.endings` knows the reason);
* torchrun, or where ``MINDX_REHEARSE_EXIT=1`` says so the platform: the processes leave with 75;
* otherwise the process itself, if it is the only one: ``exec`` of the same command once the program has come to its
  end, with the environment that it was started with.

A place is rehearsed once a run: not again where the run has been resumed at or after it.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from mindx_elastic.alarm.alarm import REHEARSAL
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.guard.observers import program
from mindx_elastic.guard.opening import Opening
from mindx_elastic.guard.policy import policies_for
from mindx_elastic.guard.process_end import shorten_interpreter_exit
from mindx_elastic.guard.stop_save import StopPhase
from mindx_elastic.guard.stopper import Stopper

__all__ = ["Rehearsal"]

_HEARD_S = 5.0  # the watcher is told by this process itself
_MARK = "MINDX_REHEARSED"
_VERDICTS = {
    "verified": "step %d is the one of the stopped process",
    "variables differ": "step %d is equal, but variables were not got back: see the warning above",
    "differs": "step %d is another one: see the warning above",
    "": "step %d was not compared (no step was played on at the stop)",
}


class Rehearsal:
    """One per entered guard. Training thread."""

    def __init__(self, opening: Opening, stopper: Stopper, *, trains: bool) -> None:
        """The state is back. `trains`: this is the run itself, no evaluation and no run of `prove`."""
        self._stopper, self._settings = stopper, opening.settings
        start = opening.start
        self._resumed, self._epoch = start.step or 0, 0
        info = None if start.resumed is None else start.resumed.checkpoint.info
        is_of_rehearsal = trains and info is not None and info.reason.startswith(REHEARSAL)
        self._told_of = info if is_of_rehearsal else None
        is_in_first = opening.collector.position.epoch <= 1
        ahead = [p for p in opening.settings.rehearse if (is_in_first if p == "epoch" else self._is_ahead(p))]
        self._places = ahead if trains else []
        self._by_exec = False
        self.is_called_off = False
        """A signal has come while the job stopped for its rehearsal: it is to end."""
        if self._places and (problem := self._why_not(opening)):
            self._places = []
            if stopper.ranks.rank == 0:
                logger.warning("no rehearsal: %s", problem)

    @property
    def is_over(self) -> bool:
        """There is nothing more to do."""
        return not self._places and self._told_of is None

    def _why_not(self, opening: Opening) -> str:
        """Why this job is not rehearsed; empty: it can be. Finds out who starts the new processes."""
        rehearsed, alarm = self._settings.rehearsed, self._stopper.alarms.of_rehearsal(0)
        if rehearsed > self._resumed:
            return f"this run was rehearsed at step {rehearsed}, and goes on from step {self._resumed}"
        if opening.options.resume != "auto":
            return 'it needs Guard(resume="auto"): the new processes must find the file of the stop'
        if not any(policy.save for policy in policies_for(opening.policies, alarm)):
            return "no policy of this guard saves at a signal"
        if opening.around.link is not None or self._settings.rehearse_by_exit:
            return ""
        if most := os.environ.get("TORCHELASTIC_MAX_RESTARTS", ""):
            left = int(most or 0) - self._stopper.ranks.attempt
            return "" if left > 0 else "torchrun has no restart left for it; give --max-restarts, or mindx-elastic run"
        if self._stopper.ranks.world_size > 1:
            return "nothing is known to start all ranks again; use mindx-elastic run, or MINDX_REHEARSE_EXIT=1"
        if getattr(sys.modules["__main__"], "__file__", None) is None and "-c" not in sys.orig_argv:
            return "this program was not started from a file, so that it cannot be begun again"
        self._by_exec = True
        return ""

    # --- the stop ---

    def at_boundary(self, position: Position, *, is_cut: bool, outcome: str | None) -> None:
        """A boundary was passed. Orders the stop at a place, and waits until it is under way. `outcome`: of the
        comparison with the stopped process; None: it is not over."""
        if not is_cut or position.step <= self._resumed:
            return
        if self._told_of is not None and outcome is not None:
            self._tell(position.step, outcome)
        before, self._epoch = self._epoch, position.epoch
        is_behind_first = (before, position.epoch) == (1, 2)  # the code between the epochs has run as well
        if any(is_behind_first if p == "epoch" else not self._is_ahead(p, position.step) for p in self._places):
            self._places = []
            alarm = self._stopper.alarms.of_rehearsal(position.step)
            if self._by_exec:
                atexit.register(self._begin_again)
            self._stopper.watcher.post(lambda: self._stopper.hear(alarm))
            self._stopper.step_gate.wait_for_limit(_HEARD_S)

    def _is_ahead(self, place: int | str, step: int = -1) -> bool:
        """Whether a step comes after `step`, usually the resumed one."""
        return isinstance(place, int) and place > max(self._resumed, step)

    def _begin_again(self) -> None:
        """At the interpreter's end, before what was registered earlier: that is done first, and then the program is
        begun again. Where the stop has not led to a file the process ends, with 75."""
        atexit.unregister(self._begin_again)
        stopper = self._stopper
        is_saved = stopper.phase is StopPhase.SAVED and stopper.save.path is not None
        alarm = stopper.alarm
        if self.is_called_off or stopper.finished or alarm is None or alarm.kind != REHEARSAL:
            return
        if not is_saved:
            logger.error("the rehearsal ends here: its stop has not led to a file, so that a resume would lose steps")
            return
        atexit._run_exitfuncs()
        shorten_interpreter_exit()  # flushes what the program has not closed
        try:
            program.begin_again({**_started_with(), _MARK: str(stopper.save.step)})
        except OSError as error:
            logger.error("the program cannot be begun again (%s); start the same command: it goes on", error)

    # --- the resume ---

    def _tell(self, step: int, outcome: str) -> None:
        info, self._told_of = self._told_of, None
        assert info is not None
        took_s, verdict = max(0.0, time.time() - info.created), _VERDICTS[outcome] % step
        self._stopper.events.emit(
            "rehearsal", step=info.step, reason=info.reason, duration_s=took_s, outcome=outcome or "not compared"
        )
        if self._stopper.ranks.rank == 0:
            logger.info(
                "rehearsal at step %d: %.1f s from the save to the end of step %d; %s", info.step, took_s, step, verdict
            )


def _started_with() -> Mapping[str, str]:
    """The environment that this process was started with; as it is now where a program has written its title there."""
    entries = Path("/proc/self/environ").read_bytes().rstrip(b"\0").split(b"\0")
    pairs = [os.fsdecode(entry).partition("=") for entry in entries]
    return {name: value for name, _, value in pairs} if all(sign and name for name, sign, _ in pairs) else os.environ
