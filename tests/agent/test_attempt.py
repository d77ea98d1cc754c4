"""Who is at fault where several ranks are stuck. All else that an attempt does: `tests.simulation.agents`."""

from __future__ import annotations

import pytest

from mindx_elastic.agent.attempt import _culprits
from mindx_elastic.agent.hang import Stuck
from mindx_elastic.core.status_page import Status, WorkerPhase

IN_TRAINING = Status(pid=1, phase=WorkerPhase.TRAINING, step=3, boundaries=3, entered_ns=1, boundary_ns=1)


@pytest.mark.parametrize(("states", "found"), [("SRS", [1]), ("SSD", [2]), ("SST", [2]), ("SSS", []), ("RRR", [])])
def test_who_the_others_wait_for_in_the_same_step(states: str, found: list[int]) -> None:
    stuck = [Stuck(rank, 3, 60.0) for rank in range(3)]
    assert _culprits(stuck, dict(enumerate(states)), dict.fromkeys(range(3), IN_TRAINING)) == found
