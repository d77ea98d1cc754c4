"""The real Ray Train, whose loop runs in a thread: a killed worker, and the run ends as one in which nothing died."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness import JOBS
from tests.watchdog import finish

pytestmark = pytest.mark.drill


def test_a_killed_worker_costs_no_result(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    ends = {}
    for name, more in (("whole", []), ("killed", ["5"])):
        folder = tmp_path / name
        folder.mkdir()
        done = finish([sys.executable, str(JOBS / "ray_train.py"), str(folder), *more])
        assert "FIT None" in done.stdout, done.stdout + done.stderr
        ends[name] = [(folder / f"rank_{rank}.txt").read_text().split() for rank in (0, 1)]
    assert {digest for end in ends.values() for digest, _ in end} == {ends["whole"][0][0]}
    assert [step for _, step in ends["killed"]] == ["5", "5"] and ends["whole"][0][1] == "None"
