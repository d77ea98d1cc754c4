"""Each loop of `verdicts`: exact after stops at random boundaries, refused, told by the first resume, or found by
``prove``. None is silent."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindx_elastic.persist.format import read_header
from tests.harness import Job, start_agent, start_job
from tests.natural.verdicts import LOOPS, Exact, Found, Loop, Refused, Told, Warned

pytestmark = pytest.mark.slow

RUN = Path(__file__).parent / "run.py"
_ENVIRONMENT = {"MINDX_GRACE_S": "60"}
_EXACT = [loop for loop in LOOPS if isinstance(loop.verdict, Exact)]
_OFTEN = ("workers, and a count of batches for the log", "stream_shuffle_buffer", "ddp, a distributed sampler")
"""Those that every run of the tests stops, besides those of docs/your-loop.md; `make drill` stops all, more often."""
_LISTS = {
    "accumulates by a count of its own: a stop waits for the last of three",
    "workers, and a count of batches for the log",
}
"""Exact loops with a variable that a resumed run has otherwise, which the line says."""
_STOP = 7
"""In the middle of an epoch."""


def _with(*verdicts: type) -> pytest.MarkDecorator:
    found = [loop for loop in LOOPS if isinstance(loop.verdict, verdicts)]
    return pytest.mark.parametrize("loop", found, ids=lambda loop: loop.name)


def run(loop: Loop, directory: Path, *, stop: int = 0, code: int | None = 0, rank: int = 0) -> Job:
    """One start of the loop, with `stop`: stopped at that boundary."""
    args: list[object] = [stop, loop.write(directory.parent), directory]
    name = str(RUN)
    if loop.ranks > 1:
        name, args = "ranks.py", [loop.ranks, RUN, *args]
    with start_job(name, *args, env={**_ENVIRONMENT, "NATURAL_RANK": str(rank)}) as job:
        if code is None:
            job.wait()
            return job
        return job.expect(code)


def result(job: Job) -> list[str]:
    found = sorted(line for line in job.lines if line.startswith("DONE "))
    assert found, job.report()
    return found


def check_exact(loop: Loop, tmp_path: Path, *, seed: int, stops: int) -> None:
    straight = run(loop, tmp_path / "straight")
    total = int(straight.matches(r"STEPS (\d+)")[0][1])
    draw = random.Random(f"{loop.name} {seed}")
    chosen = sorted(draw.sample(range(1, total + 1), min(stops, total)))
    saved, said = 0, [straight]
    for stop in chosen:
        rank = draw.randrange(loop.ranks)
        if stop > saved:  # else the stop before has waited for the end of an accumulation window
            job = run(loop, tmp_path / "stopped", stop=stop, code=143, rank=rank)
            said.append(job)
            assert f"STOPPING {stop}" in job.lines, job.report()
            saved = int(job.matches(r"step (\d+) saved in")[0][1])
    resumed = run(loop, tmp_path / "stopped")
    assert any("resumed from" in line for line in resumed.lines), resumed.report()
    assert result(resumed) == result(straight), f"stopped at {chosen} of {total}\n{resumed.report()}"
    if _plays_on(tmp_path / "stopped", saved) and saved < total:
        assert resumed.matches(r"verified: step \d+ is the one of the stopped process"), resumed.report()
    for job in (*said, resumed):
        assert not _warnings(job), job.report()
        assert loop.name in _LISTS or not job.matches("verified.*not as they were"), job.report()


@pytest.mark.parametrize("loop", [loop for loop in _EXACT if loop.name in _OFTEN], ids=lambda loop: loop.name)
def test_a_stopped_run_ends_with_the_same_numbers(loop: Loop, tmp_path: Path) -> None:
    check_exact(loop, tmp_path, seed=1, stops=1)


@pytest.mark.drill
@pytest.mark.parametrize("seed", [2, 3, 4])
@_with(Exact)
def test_a_run_stopped_three_times_ends_with_the_same_numbers(loop: Loop, seed: int, tmp_path: Path) -> None:
    check_exact(loop, tmp_path, seed=seed, stops=3)


def check_killed(loop: Loop, tmp_path: Path, *, stop: int, recover: str = "restart") -> None:
    """Killed in step `stop`, or its last one, with a snapshot at each step."""
    straight = run(loop, tmp_path / "straight")
    stop = min(stop, int(straight.matches(r"STEPS (\d+)")[0][1]))
    env = {**_ENVIRONMENT, "NATURAL_KILL": str(tmp_path / "killed"), "NATURAL_RANK": str(loop.ranks - 1)}
    options = ["--snapshot-every", "1", "--recover", recover, "--nproc-per-node", str(loop.ranks)]
    options += ["--run-dir", str(tmp_path / "run")]
    words = [stop, loop.write(tmp_path), tmp_path / "checkpoints"]
    with start_agent(str(RUN), *words, options=options, env=env) as job:
        job.expect(0)
    assert f"KILLING {stop}" in job.lines, job.report()
    assert sorted(set(result(job))) == sorted(set(result(straight))), job.report()
    assert not job.matches("is not what it was before|not got back"), job.report()


@pytest.mark.drill
@pytest.mark.parametrize("recover", ["restart", "in-place"])
@_with(Exact)
def test_a_killed_run_ends_with_the_same_numbers(loop: Loop, recover: str, tmp_path: Path) -> None:
    check_killed(loop, tmp_path, stop=_STOP, recover=recover)


def _plays_on(directory: Path, step: int) -> bool:
    """Whether neither the end of an epoch nor its last batch, which a loop may have fetched, comes behind `step`."""
    infos = [read_header(path).info for path in directory.rglob("*.safetensors")]
    return all(info.step_in_epoch + 1 < info.batch_num or not info.batch_num for info in infos if info.step == step)


def _warnings(job: Job) -> list[str]:
    of_a_stop = re.compile("SIGTERM heard|SIGTERM on rank|Graceful exit is triggered")
    return [line for line in job.lines if "WARNING" in line and not of_a_stop.search(line)]


def check_told(loop: Loop, words: str, tmp_path: Path) -> None:
    """Stopped in the middle, and resumed: one line says the variable or the cause."""
    run(loop, tmp_path / "told", stop=_STOP, code=143)
    resumed = run(loop, tmp_path / "told", code=None)
    lines = [line for line in resumed.lines if "of the stopped process" in line]
    assert any(words in line for line in lines), f"{words!r} is not said\n{resumed.report()}"


@pytest.mark.few(2)
@_with(Told)
def test_what_goes_on_and_is_not_kept_is_told_by_the_first_resume(loop: Loop, tmp_path: Path) -> None:
    assert isinstance(loop.verdict, Told)
    check_told(loop, loop.verdict.words, tmp_path)


@pytest.mark.few(4)
@_with(Refused)
def test_what_cannot_be_kept_is_refused(loop: Loop, tmp_path: Path) -> None:
    assert isinstance(loop.verdict, Refused)
    job = run(loop, tmp_path / "refused", code=1)
    assert any("UnmanagedStateError" in line or "UsageError" in line for line in job.lines), job.report()
    assert any(loop.verdict.words in line for line in job.lines), f"{loop.verdict.words!r} is not said\n{job.report()}"
    assert bool(list((tmp_path / "refused").rglob("*.safetensors"))) == loop.verdict.saves, job.report()


@pytest.mark.drill
@_with(Warned)
def test_what_may_differ_is_a_warning_of_the_first_run(loop: Loop, tmp_path: Path) -> None:
    assert isinstance(loop.verdict, Warned)
    job = run(loop, tmp_path / "warned")
    said = [line for line in job.lines if "WARNING" in line]
    assert any(loop.verdict.words in line for line in said), f"{loop.verdict.words!r} is not said\n{job.report()}"


def _found(loop: Loop) -> Found | None:
    found = loop.verdict.found if isinstance(loop.verdict, Told) else loop.verdict
    return found if isinstance(found, Found) else None


_PROVED = [(loop, found) for loop in LOOPS if (found := _found(loop)) is not None]


@pytest.mark.drill  # `tests/cli/test_prove_command.py` has one of each kind
@pytest.mark.parametrize(("loop", "found"), [pytest.param(*each, id=each[0].name) for each in _PROVED])
def test_prove_finds_what_nothing_else_can_see(loop: Loop, found: Found, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mindx_elastic.cli.main", "prove", "--stops", str(found.stops), "--seed", "1"]
    command += ["--nproc-per-node", str(loop.ranks)] if loop.ranks > 1 else []
    command += ["--steps", str(found.steps)] if found.steps else []
    command += ["--", str(loop.write(tmp_path)), str(tmp_path / "never")]
    root = str(Path(__file__).parents[2])
    env = {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": "1", "COLUMNS": "500", "PYTHONPATH": root}
    proved = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)
    shown = " ".join(proved.stdout.split())
    assert proved.returncode != 0, proved.stdout + proved.stderr
    assert found.words in shown, f"{found.words!r} is not said\n{proved.stdout}{proved.stderr}"
    assert found.variable in shown.partition("not got back: ")[2] or not found.variable, proved.stdout
    assert not (tmp_path / "never").exists()


def test_every_loop_has_a_verdict_and_every_change_its_place(tmp_path: Path) -> None:
    files = {path.stem for path in (Path(__file__).parent / "loops").glob("*.py")}
    names = [(loop.name, *loop.change) for loop in LOOPS]
    assert files == {loop.of or loop.name for loop in LOOPS}
    assert len(names) == len(set(names))
    for loop in LOOPS:
        compile(loop.write(tmp_path).read_text(), loop.name, "exec")
