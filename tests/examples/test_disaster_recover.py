"""The example of the dynamic cluster, as its scripts start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.harness import free_port
from tests.watchdog import Watchdog

EXAMPLE = Path(__file__).parents[2] / "examples" / "disaster_recover"
pytestmark = pytest.mark.slow


class Example:
    """One run of it in a folder of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._env = environment | {
            "WORK_DIR": str(folder),
            "WORKER_NUM": "2",
            "MS_SCHED_PORT": str(free_port()),
            "PYTHON": sys.executable,
            "PYTHONWARNINGS": "ignore",
        }
        self._env.pop("RANK", None)

    def script(self, name: str, *arguments: str) -> str:
        return subprocess.run(
            ["bash", str(EXAMPLE / name), *arguments],
            env=self._env,
            capture_output=True,
            text=True,
            check=True,
            start_new_session=True,
        ).stdout

    def pid(self, name: str) -> int:
        return int((self.folder / "device" / f"{name}.pid").read_text())

    def log(self, name: str) -> str:
        return (self.folder / "device" / f"{name}.log").read_text()

    def wait_for(self, name: str, text: str) -> str:
        """The line of the log with `text`."""
        watchdog = Watchdog(self.pid(name))
        while not (found := [line for line in self.log(name).splitlines() if text in line]):
            try:
                watchdog.check(len(self.log(name)))
            except AssertionError as error:
                raise AssertionError(f"{name}: no {text!r}: {error}\n{self.logs()}") from None
            time.sleep(0.05)
        return found[-1]

    def report(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.wait_for(name, '"train_end"'))
        return found

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in (self.folder / "device").glob("*.log"))

    def end(self) -> None:
        for path in (self.folder / "device").glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[[str], Example]]:
    runs: list[Example] = []

    def make(name: str) -> Example:
        (tmp_path / name).mkdir()
        runs.append(Example(tmp_path / name, environment))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


@pytest.mark.drill
def test_a_worker_is_killed_and_recover_starts_it_again(start: Callable[[str], Example]) -> None:
    example, undisturbed = start("killed"), start("undisturbed")
    assert "1 scheduler and 2 workers" in example.script("run.sh", "--epochs", "1", "--step-s", "0.05")
    example.wait_for("worker_0", "step: 10")
    survivor, killed = example.pid("worker_0"), example.pid("worker_1")
    os.kill(killed, signal.SIGKILL)
    example.wait_for("scheduler", "is dead")
    said = example.script("recover.sh")
    assert f"runs already: worker_0 (pid {survivor})" in said and "started again: worker_1" in said
    first, second = example.report("worker_0"), example.report("worker_1")
    example.wait_for("scheduler", "all 2 workers have finished")
    assert example.pid("worker_0") == survivor
    assert first["resumed_from_step"] == second["resumed_from_step"] >= 10
    assert first["step"] == 29
    undisturbed.script("run.sh", "--epochs", "1", "--step-s", "0")
    hashes = {run["weights_sha256"] for run in (first, second, undisturbed.report("worker_0"))}
    assert len(hashes) == 1
    for rank in range(2):  # each worker has its own directory
        assert list((example.folder / "ckpt_of_rank" / str(rank) / f"rank_{rank}").glob("train-1_29*.safetensors"))
