"""What `make drill` does when a part fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = {
    "pytest": "-m pytest -n 2 --dist loadfile --no-loadscope-reorder -m drill",
    "drill": "-m tests.drill --faults 1",
}


def make_drill(folder: Path, failing: str) -> subprocess.CompletedProcess[str]:
    """With a stand-in for Python that fails for the parts whose names are in `failing`."""
    shutil.copy(ROOT / "Makefile", folder)
    done = folder / ".venv" / ".done"
    (folder / ".venv" / "bin").mkdir(parents=True)
    done.mkdir()
    for name in ("pyproject.toml", "requirements/torch-cpu.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    for name in ("venv", "torch", "dev"):
        (done / name).touch()
    python = folder / ".venv" / "bin" / "python"
    lines = ("#!/bin/sh", 'echo "$@" >> ran', 'for each in $FAILING; do [ "$2" = "$each" ] && exit 7; done', "exit 0")
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    command = ["make", "drill", "DRILL_ARGS=--faults 1", "PYTEST_ARGS="]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "FAILING": failing}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("failing", ["", "pytest", "tests.drill", "pytest tests.drill"])
def test_every_part_of_the_drill_runs_and_the_end_names_those_that_failed(tmp_path: Path, failing: str) -> None:
    done = make_drill(tmp_path, failing)
    said = done.stdout + done.stderr
    assert (tmp_path / "ran").read_text().split("\n")[:-1] == [part.strip() for part in PARTS.values()], said
    assert (done.returncode == 0) == (failing == ""), said
    named = [line for line in done.stderr.splitlines() if line.startswith("drill: FAILED: ")]
    assert len(named) == len(failing.split()), said
    for line, name in zip(named, failing.split(), strict=True):
        assert f" -m {name} " in line and "exit code 7" in line
    assert ("drill: both parts passed" in done.stdout) == (failing == "")


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
