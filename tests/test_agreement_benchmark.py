"""benchmarks/bench_agreement.py: stand-ins, which send what was recorded of a whole rank, and whole ranks agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(("ranks", "whole"), [(12, 1), (103, 5), (6, 6)])
def test_all_ranks_agree_in_every_round(ranks: int, whole: int, tmp_path: Path) -> None:
    """The ranks have numbers of up to three digits. Each may be the last to offer, and so the one that concludes."""
    told = tmp_path / "told.json"
    words = ["--ranks", str(ranks), "--real", str(whole), "--rounds", "12", "--json", str(told)]
    ended = subprocess.run(
        [sys.executable, "bench_agreement.py", *words], cwd=BENCHMARKS, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = json.loads(told.read_text())["results"]
    for alarm in ("all", "one"):
        assert len(found["methods"][alarm]["seconds"]["values"]) == 12
        assert 6 <= found["methods"][alarm]["per rank"]["min"] <= found["methods"][alarm]["messages"]["max"] <= 12
