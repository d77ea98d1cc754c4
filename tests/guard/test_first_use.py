"""A first step with several batches: what the model is given shows whether the last of them is used or ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guard.loader_loops import EPOCHS, Run
from tests.guard.test_loader_watch import stop_and_resume

pytestmark = pytest.mark.usefixtures("clean")


def leaves_the_first_out(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        for number, batch in run.guard.enumerate(loader):
            if number != 0:
                run.train(batch)


def leaves_the_first_out_of_copies(run: Run, loader: Any) -> None:
    """As on a device."""
    for _ in run.guard.epochs(EPOCHS):
        for number, batch in run.guard.enumerate(loader):
            if number != 0:
                run.train([part.clone() for part in batch])


def accumulates(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        for number, batch in run.guard.enumerate(loader):
            run.forward(batch).backward()
            if number % 2:
                run.update()


def holds_one(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        held = None
        for batch in loader:
            if held is not None:
                run.train(held)
            held = batch
        run.train(held)


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("form", [leaves_the_first_out, leaves_the_first_out_of_copies, accumulates])
def test_the_first_step_is_a_boundary_where_its_batches_are_used(
    form: Callable[[Run, Any], None], stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stop_and_resume(form, tmp_path, stop)
    assert f"step {stop} saved" in caplog.text and "ahead" not in caplog.text


def test_what_is_held_for_the_next_step_is_ahead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stop_and_resume(holds_one, tmp_path, 3)
    assert "fetches 1 batches of loader ahead" in caplog.text
