"""Loops of several ranks: evaluations on the training's own loader, and a stop inside one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_job


@pytest.mark.drill
def test_two_ranks_stop_in_an_evaluation_and_go_on(tmp_path: Path) -> None:
    whole = run_job("stepping.py", tmp_path / "whole", ranks=2)
    expected = whole.hashes()
    assert set(expected) == {0, 1}
    stopped = run_job("stepping.py", tmp_path / "job", "--stop", 8, 1, ranks=2, code=1)
    assert not stopped.hashes()
    again = run_job("stepping.py", tmp_path / "job", ranks=2)
    begun = {m[1] for m in again.matches(r"READY \d \d+ (\w+)")}
    assert len(begun) == 1 and 8 <= int(*begun) < 13  # until the ranks have agreed
    assert again.hashes() == expected
