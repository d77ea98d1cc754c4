"""What a boundary notes of its loss, and what it does not wait for."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mindx_elastic.core.status_page import Status, StatusPage, read_page
from mindx_elastic.guard import progress as tested
from mindx_elastic.guard.progress import Progress


def noted(folder: Path, *losses: object) -> Status:
    page = StatusPage(folder / "page")
    progress = Progress(page)
    for step, loss in enumerate(losses, start=1):
        progress.at_boundary(step, loss)
    page.close()
    found = read_page(folder / "page")
    assert found is not None
    return found


@pytest.fixture
def no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_GAP_NS", 0)


@pytest.mark.usefixtures("no_gap")
def test_numbers_and_tensors_of_one_are_losses(tmp_path: Path) -> None:
    one = torch.tensor(0.25, requires_grad=True)
    for loss, value in ((1.5, 1.5), (2, 2.0), (one, 0.25), (torch.tensor([[3]]), 3.0), (np.float32(0.5), 0.5)):
        found = noted(tmp_path, None, loss)
        assert (found.loss, found.loss_step) == (value, 2)
    for none in (None, True, "1.0", torch.ones(3), torch.tensor(1j), torch.ones((), device="meta")):
        found = noted(tmp_path, None, none)
        assert (found.loss, found.loss_step) == (None, -1), none
    nan = noted(tmp_path, torch.tensor(float("nan"))).loss
    assert nan is not None and math.isnan(nan)


def test_a_fast_loop_notes_few_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**9]
    page = StatusPage(tmp_path / "page")
    noted: list[int] = []
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(page, "note_loss", lambda step, clock_ns, loss: noted.append(step))
    progress = Progress(page)
    for step in range(1, 1001):
        now[0] += 10**6
        progress.at_boundary(step, step)
    assert noted == list(range(1, 1001, 100))
    page.close()


@pytest.mark.usefixtures("no_gap")
def test_the_programs_own_number_that_fails_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def __float__(self) -> float:
            raise ValueError("no number yet")

    found = noted(tmp_path, Odd(), Odd(), 1.0)
    assert found.loss is None
    assert len([each for each in caplog.records if "no number yet" in each.getMessage()]) == 1
