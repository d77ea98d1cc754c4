"""A rehearsal: a stop that the job orders itself, early, to try its own resume on the real machine.

At the place that was asked for the job stops as for SIGTERM (same agreement, save and overlap) and goes on in new
processes, which compare themselves with the old ones and say what it cost. Who starts them:

* the agent, without counting a restart (`agent.endings` knows the reason);
* torchrun, or where ``MINDX_REHEARSE_EXIT=1`` says so the platform: the processes leave with 75.

A place is rehearsed once a run: not again where the run has been resumed at or after it.
"""

from __future__ import annotations

import os
import time

from mindx_elastic.alarm.alarm import REHEARSAL
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.guard.opening import Opening
from mindx_elastic.guard.policy import policies_for
from mindx_elastic.guard.stopper import Stopper

__all__ = ["Rehearsal"]

_HEARD_S = 5.0  # the watcher is told by this process itself
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
        if self._places and (problem := self._why_not(opening)):
            self._places = []
            if stopper.ranks.rank == 0:
                logger.warning("no rehearsal: %s", problem)

    @property
    def is_over(self) -> bool:
        """There is nothing more to do."""
        return not self._places and self._told_of is None

    def _why_not(self, opening: Opening) -> str:
        """Why this job is not rehearsed; empty: it can be."""
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
        return "nothing is known to start the job again; use mindx-elastic run, or MINDX_REHEARSE_EXIT=1"

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
            self._stopper.watcher.post(lambda: self._stopper.hear(alarm))
            self._stopper.step_gate.wait_for_limit(_HEARD_S)

    def _is_ahead(self, place: int | str, step: int = -1) -> bool:
        """Whether a step comes after `step`, usually the resumed one."""
        return isinstance(place, int) and place > max(self._resumed, step)

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
