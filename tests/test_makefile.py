"""What `make drill` does when a part fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_another_python_than_that_of_the_venv_is_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for path, says in [(".venv/bin/python", "/usr/bin/python3.11 3 11 7"), ("other", "/usr/bin/python3.12 3 12 1")]:
        (tmp_path / path).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / path).chmod(0o755)

    def make(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", "help", *words], cwd=tmp_path, capture_output=True, text=True, check=False)

    refused = make("PYTHON=./other")
    assert refused.returncode == 2
    assert ".venv is there and was not made from PYTHON=./other. To use it, remove .venv first" in refused.stderr
    assert make().returncode == make("PYTHON=.venv/bin/python").returncode == 0
    shutil.rmtree(tmp_path / ".venv")
    assert make("PYTHON=./other").returncode == 0
