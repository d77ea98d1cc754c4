"""DDP in other forms than ``Guard(model=DDP(model))``, on three ranks: two add up the same in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_job

pytestmark = pytest.mark.slow


@pytest.mark.drill
@pytest.mark.parametrize(
    ("form", "stop_at"),
    [
        pytest.param("hidden", 4, marks=pytest.mark.drill),
        ("static", 1),
        pytest.param("static", 4, marks=pytest.mark.drill),
    ],
)
def test_a_resumed_run_adds_gradients_in_the_same_order(form: str, stop_at: int, tmp_path: Path) -> None:
    env = {"MINDX_SNAPSHOT_EVERY": "0"}
    options = ("--ddp", form, "--epochs", 2)
    whole = run_job("loop.py", tmp_path / "whole", *options, ranks=3, env=env)
    stopped = tmp_path / "stopped"
    run_job("loop.py", stopped, *options, "--ask-stop-at", stop_at, ranks=3, env=env)
    again = run_job("loop.py", stopped, *options, ranks=3, env=env)
    # A request leads to a stop at one of the next boundaries: its own step's, or that of one which a rank has begun.
    assert again.matches(rf"READY \d+ \d+ ({stop_at}|{stop_at + 1})\b"), again.report()
    assert again.hashes() == whole.hashes(), again.report()
    assert not again.matches("could not be restored|no DDP"), again.report()
