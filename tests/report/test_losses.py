"""The loss over all restarts: one line without a gap, what was done again, and the seams."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.agent.progress_log import Piece
from mindx_elastic.report.drawing import loss_line
from mindx_elastic.report.losses import Losses, Seam, find_losses
from mindx_elastic.report.page import make_page
from mindx_elastic.report.story import tell
from tests.harness import start_agent


def piece(*steps: int, agent: str = "a", attempt: int = 0, loss: float | None = None) -> Piece:
    points: list[tuple[float, int, float | None]] = [
        (float(number), step, step / 10 if loss is None else loss) for number, step in enumerate(steps)
    ]
    return Piece(agent, attempt, 1, points)


def steps_of(parts: object) -> list[list[int]]:
    assert isinstance(parts, list)
    return [[step for step, _ in part] for part in parts]


@pytest.mark.parametrize(
    ("pieces", "kept", "redone", "seams"),
    [
        ([piece(1, 2, 3)], [[1, 2, 3]], [], []),
        ([piece(1, 2, 3), piece(4, 5)], [[1, 2, 3], [3, 4, 5]], [], [Seam(3, 0)]),
        ([piece(1, 2, 3, 4), piece(3, 4, 5)], [[1, 2], [2, 3, 4, 5]], [[2, 3, 4]], [Seam(2, 2)]),
        ([piece(1, 2, 3), piece(1, 2, 3, 4)], [[1, 2, 3, 4]], [[1, 2, 3]], [Seam(0, 3)]),
        ([piece(1, 2, 3, 2, 3, 4)], [[1], [1, 2, 3, 4]], [[1, 2, 3]], [Seam(1, 2)]),
        (
            [piece(1, 2, 3, 4, 5), piece(5, 6), piece(3, 4, 5, 6, 7)],
            [[1, 2], [2, 3, 4, 5, 6, 7]],
            [[2, 3, 4, 5], [5, 6]],
            [Seam(4, 3), Seam(2, 2)],
        ),
        ([piece(1, 2, agent="old"), piece(1, 2, 3, agent="new")], [[1, 2, 3]], [], []),
        ([piece(1, 2, agent="old"), piece(3, 4, agent="new")], [[1, 2], [2, 3, 4]], [], [Seam(2, 0)]),
        ([Piece("a", 0, 1, [(0.0, 1, None)])], [], [], []),
    ],
)
def test_parts_and_seams(
    pieces: list[Piece], kept: list[list[int]], redone: list[list[int]], seams: list[Seam]
) -> None:
    found = find_losses(pieces)
    assert steps_of(found.kept) == kept and steps_of(found.seams and found.redone) == redone
    assert found.seams == seams


@pytest.mark.parametrize("losses", [(1e308, -1e308), (0.0, 0.0), (5e-324, 0.0), (1.0, 1e-300)])
def test_losses_of_any_size_can_be_drawn(losses: tuple[float, float]) -> None:
    figure, _ = loss_line(find_losses([piece(1, 2, loss=losses[0]), piece(3, loss=losses[1])]))
    assert "nan" not in figure and "inf" not in figure and figure.count("<polyline") == 2


def test_without_losses_the_page_says_so() -> None:
    assert loss_line(Losses([], [], [], 0))[1] == [
        "no loss is known: the job gave none to step_end(loss=...), or rank 0 ran on another node"
    ]


@pytest.mark.slow
def test_a_killed_and_resumed_job_has_one_curve(tmp_path: Path) -> None:
    """Killed behind step 8 of 12, with a snapshot of step 5 at best: steps are done again."""
    args = [tmp_path / "ckpt", "--steps", "12", "--kill-at", "8", "--step-s", "0.05"]
    with start_agent("agent_guarded.py", *args, options=["--snapshot-every", "5"], run_dir=tmp_path / "run") as job:
        job.expect(0)
    story = tell(tmp_path / "run" / "events.jsonl")
    assert story is not None and [record.outcome for record in story.run.records] == ["failed", "finished"]
    resumed = max(0, story.run.records[1].resumed_step or 0)
    (seam,) = story.losses.seams
    assert (seam.step, seam.done_again) == (resumed, 8 - resumed) and seam.done_again > 0, job.report()
    curve = sorted({point for part in story.losses.kept for point in part})
    assert [step for step, _ in curve] == list(range(1, 13)), "no gap, each step once"
    again = dict(point for part in story.losses.redone for point in part)
    assert again.items() <= dict(curve).items(), "done again, bit for bit"
    page = make_page(story)
    assert page.count('class="again"') == 1 and "Loss over steps" in page
