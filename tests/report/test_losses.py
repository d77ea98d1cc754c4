"""The loss over all restarts: one line without a gap, and the seams."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.agent.progress_log import ProgressPiece
from mindx_elastic.report.drawing import loss_line
from mindx_elastic.report.losses import find_losses
from mindx_elastic.report.page import make_page
from mindx_elastic.report.run_history import tell
from tests.harness import start_agent


def piece(*steps: int, agent: str = "a", loss: float | None = None) -> ProgressPiece:
    points: list[tuple[float, int, float | None]] = [
        (float(number), step, step / 10 if loss is None else loss) for number, step in enumerate(steps)
    ]
    return ProgressPiece(agent, 0, 1, points)


@pytest.mark.parametrize(
    ("pieces", "steps", "seams"),
    [
        ([piece(1, 2, 3), piece(4, 5)], [1, 2, 3, 4, 5], [3]),
        ([piece(1, 2, 3, 4, 9), piece(3, 4, 5)], [1, 2, 3, 4, 5], [2]),
        ([piece(1, 2, 3, 2, 3, 4)], [1, 2, 3, 4], [1]),
        ([piece(1, 2, 3, 4, 5), piece(5, 6), piece(3, 4, 5, 6, 7)], [1, 2, 3, 4, 5, 6, 7], [4, 2]),
        ([piece(1, 2, agent="old"), piece(1, 2, 3, agent="new")], [1, 2, 3], []),
        ([piece(1, 2, agent="old"), piece(3, 4, agent="new")], [1, 2, 3, 4], [2]),
        ([ProgressPiece("a", 0, 1, [(0.0, 1, None)])], [], []),
    ],
)
def test_each_step_is_there_once_and_each_seam(pieces: list[ProgressPiece], steps: list[int], seams: list[int]) -> None:
    found = find_losses(pieces)
    assert ([step for step, _ in found.points], found.seams) == (steps, seams)


def test_of_a_step_that_is_done_again_the_second_time_counts() -> None:
    assert find_losses([piece(1, 2, loss=5.0), piece(2, loss=6.0)]).points == [(1, 5.0), (2, 6.0)]


@pytest.mark.parametrize(
    "losses",
    [
        (1e308, -1e308),
        (0.0, 0.0),
        (5e-324, 0.0),
    ],
)
def test_losses_of_any_size_can_be_drawn(losses: tuple[float, float]) -> None:
    figure, _ = loss_line(find_losses([piece(1, 2, loss=losses[0]), piece(3, loss=losses[1])]))
    assert "nan" not in figure and "inf" not in figure and figure.count("<polyline") == 1


@pytest.mark.slow
def test_a_killed_and_resumed_job_has_one_curve(tmp_path: Path) -> None:
    """Killed after step 5 of 8, with a snapshot of step 4 at best: a step is done again."""
    args = [tmp_path / "ckpt", "--steps", "8", "--kill-at", "5", "--step-s", "0.7"]  # the agent looks twice a second
    with start_agent("agent_guarded.py", *args, options=["--snapshot-every", "4"], run_dir=tmp_path / "run") as job:
        job.expect(0)
    story = tell(tmp_path / "run" / "events.jsonl")
    assert story is not None and [record.outcome for record in story.run.records] == ["failed", "finished"]
    resumed = max(0, story.run.records[1].resumed_step or 0)
    (seam,) = story.losses.seams
    assert resumed <= seam < 5, job.report()
    steps = [step for step, _ in story.losses.points]
    assert steps == sorted(set(steps)) and steps[-1] == 8, "each step once"
    assert "Loss over steps" in make_page(story)
