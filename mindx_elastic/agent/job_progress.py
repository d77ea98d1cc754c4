"""What ``--trainer-status`` is told: how far the job is, from rank 0's status page and the account of the attempts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mindx_elastic.agent.ledger import AttemptRecord, add_up
from mindx_elastic.core.status_page import Status
from mindx_elastic.platforms.trainer_status import JobProgress, TrainerReporter

__all__ = ["ProgressTeller"]

_NS = 1e9


class ProgressTeller:
    """Main thread. Tells only what is known of rank 0: the agents of other nodes tell nothing."""

    def __init__(self, reporter: TrainerReporter) -> None:
        self._reporter = reporter
        self._newest: JobProgress | None = None

    def look(self, statuses: Mapping[int, Status], records: Iterable[AttemptRecord], loss: float | None) -> None:
        """What the pages say now. `loss`: the newest that rank 0 has noted."""
        status = statuses.get(0)
        if status is None or not status.entered_ns:
            return
        totals = add_up(records)
        passed = status.boundaries - 1
        step_s = (status.boundary_ns - status.first_boundary_ns) / passed / _NS if passed > 0 else None
        self._newest = JobProgress(
            step=status.step,
            planned_steps=status.planned_steps,
            step_s=None if step_s is None else round(step_s, 6),
            loss=loss if loss is not None and math.isfinite(loss) else None,
            attempts=totals.attempts,
            failures=totals.failures,
            steps_lost=totals.steps_lost,
        )
        self._reporter.note(self._newest)

    def close(self, *, is_finished: bool) -> None:
        """The agent's end."""
        if self._newest is not None and is_finished:
            self._reporter.note(replace(self._newest, is_finished=True))
        self._reporter.close()
