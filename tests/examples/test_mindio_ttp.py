"""MindIO's guide as our example has it: train, kill rank 0, go on with ``--is_recover 1``.

Every run of the tests asks the same of a job under torchrun: tests/system/test_model.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "mindio_ttp"
pytestmark = [pytest.mark.slow, pytest.mark.drill]


def command(script: str, *arguments: str) -> list[str]:
    return ["bash", str(EXAMPLE / script), "--epochs", "1", *arguments]


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def run(script: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    words = command(script, "--step-s", "0")
    return reports(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)


def test_train_kill_and_recover(tmp_path: Path, environment: dict[str, str]) -> None:
    for name in ("killed", "straight"):
        (tmp_path / name).mkdir()
    environment |= {"WORKER_NUM": "2", "PYTHON": sys.executable, "WORK_DIR": str(tmp_path / "killed")}
    environment.pop("RANK", None)
    # A step takes so long that the kill comes in the middle of the epoch, on any machine.
    with subprocess.Popen(
        command("msrun.sh", "--step-s", "1"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        pids = {}
        for line in job.stdout:
            if found := re.match(r"rank (\d) of 2: pid (\d+)", line):
                pids[found[1]] = int(found[2])
            if "step: 5," in line:
                break
        os.kill(pids["0"], signal.SIGKILL)  # MindIO's controller runs on it and would save nothing
        rest, told = job.communicate()
    assert job.returncode not in (0, None) and not reports(rest), told
    (saved,) = (tmp_path / "killed" / "ttp_checkpoints").glob("tft_saved_checkpoints-step_*/rank_1/ttp_rank_1-1_*")
    step = int(saved.parents[1].name.rpartition("_")[2])
    assert 5 <= step < 29 and saved.suffix == ".safetensors"

    resumed = run("msrun-resume.sh", environment)
    assert [each["resumed_from_step"] for each in resumed] == [step, step] and resumed[0]["step"] == 29
    straight = run("msrun.sh", environment | {"WORK_DIR": str(tmp_path / "straight")})
    assert straight[0]["resumed_from_step"] is None
    assert len({each["weights_sha256"] for each in resumed + straight}) == 1
