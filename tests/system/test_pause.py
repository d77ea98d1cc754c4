"""``mindx-elastic pause`` and ``resume``: real jobs under the agent, paused at steps where they hold."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Job, _environment, events, start_agent
from tests.system.test_agent import nothing_left

pytestmark = pytest.mark.slow

JOB = "paused.py"
RUN = Path("mindx-run")


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shm").mkdir()


def agent(*args: object, script: str = JOB, **more: Any) -> Any:
    env = {"MINDX_ARENA_DIR": str(Path("shm").absolute()), **more.pop("env", {})}
    return start_agent(script, "ckpt", *args, env=env, **more)


@contextmanager
def command(*args: object) -> Iterator[Job]:
    job = Job([sys.executable, "-m", "mindx_elastic.cli.main", *map(str, args)], _environment(None), fresh=False)
    try:
        yield job
    finally:
        job.end()


def give(*args: object, code: int = 0) -> str:
    """Run a command to its end; what it printed."""
    with command(*args) as job:
        job.expect(code)
        return "\n".join(job.lines)


def paused_at(text: str) -> int:
    match = re.search(r"paused at step (\d+)", text)
    assert match is not None, text
    return int(match[1])


def status() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(give("status", RUN, "--json"))
    return document


def undisturbed(ranks: int, *args: object) -> dict[int, str]:
    with agent(*args, ranks=ranks, run_dir=Path("whole-run"), env={}) as job:
        job.expect(0)
    hashes: dict[int, str] = job.hashes()
    for path in Path("ckpt").rglob("*.safetensors"):
        path.unlink()
    os.rename("ckpt", "whole")
    return hashes


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.drill)])
def test_paused_three_times_it_trains_as_if_undisturbed(ranks: int) -> None:
    options = ["--num-workers", 2] if ranks == 2 else []
    whole = undisturbed(ranks, *options)
    with agent("--hold-at", "3,4,11", *options, ranks=ranks, options=["--hang-timeout", "5"]) as job:
        for count, step in enumerate((3, 4, 11), start=1):
            job.wait_for("^HOLD", count * ranks)
            assert paused_at(give("pause", RUN)) == step
            now = status()["pause"]
            assert (now["step"], now["ranks"]) == (step, list(range(ranks)))
            assert len(job.matches(rf"^PASSED \d {step}$")) == 0, "no rank has gone on"
            assert f"step {step}" in give("resume", RUN)
        job.expect(0)
    assert job.hashes() == whole, job.report()
    assert [event["step"] for event in events(RUN, "pause")] == [3, 4, 11]
    assert [event["step"] for event in events(RUN, "pause_end")] == [3, 4, 11]
    (attempt,) = events(RUN, "attempt")
    waited = sum(event["duration_s"] for event in events(RUN, "pause_end"))
    assert attempt["paused_s"] == pytest.approx(waited, abs=0.01) and waited > 0
    assert not events(RUN, "hang") and nothing_left()
