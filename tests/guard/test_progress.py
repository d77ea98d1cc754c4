"""What a boundary notes of its loss, and what it does not wait for."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.core.progress_ring import Point, RingReader
from mindx_elastic.guard import progress as tested
from mindx_elastic.guard.progress import Progress


def noted(folder: Path, *losses: object) -> list[Point]:
    progress = Progress(folder / "ring")
    for step, loss in enumerate(losses, start=1):
        progress.at_boundary(step, loss)
    reader = RingReader(folder / "ring")
    found = [point for _, points in reader.take() for point in points]
    reader.close()
    return found


@pytest.fixture
def no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_GAP_NS", 0)


LOSSES: list[tuple[Any, float | None]] = [
    (1.5, 1.5),
    (2, 2.0),
    (torch.tensor(0.25, requires_grad=True), 0.25),
    (torch.tensor([[3]]), 3.0),
    (np.float32(0.5), 0.5),
    (None, None),
    (True, None),
    ("1.0", None),
    (torch.ones(3), None),
    (torch.tensor(1j), None),
    (torch.ones((), device="meta"), None),
]


@pytest.mark.usefixtures("no_gap")
def test_numbers_and_tensors_of_one_are_losses(tmp_path: Path) -> None:
    found = noted(tmp_path, *(loss for loss, _ in LOSSES))
    assert [point.loss for point in found] == [value for _, value in LOSSES]
    assert [point.step for point in found] == list(range(1, len(LOSSES) + 1))


@pytest.mark.usefixtures("no_gap")
def test_a_loss_that_is_not_finite_is_noted_as_such(tmp_path: Path) -> None:
    (point,) = noted(tmp_path, torch.tensor(float("nan")))
    assert point.loss is not None and math.isnan(point.loss)


def test_a_fast_loop_notes_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    progress, reader = Progress(tmp_path / "ring"), RingReader(tmp_path / "ring")
    for step in range(1, 1001):
        now[0] += 10**6
        progress.at_boundary(step, step if step % 10 == 0 else None)
    found = [point for _, points in reader.take() for point in points]
    reader.close()
    assert 45 <= len([point for point in found if point.loss is not None]) <= 51
    assert len(found) <= 110, "between losses that come now and then, steps without"


@pytest.mark.usefixtures("no_gap")
def test_the_programs_own_number_that_fails_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def __float__(self) -> float:
            raise ValueError("no number yet")

    found = noted(tmp_path, Odd(), Odd(), 1.0)
    assert [point.loss for point in found] == [None, None, None]
    assert len([each for each in caplog.records if "no number yet" in each.getMessage()]) == 1
