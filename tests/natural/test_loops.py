"""Each loop in ``loops/``: exact after stops at random boundaries, refused, or found by ``prove``. None is silent."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.persist.format import read_header
from tests.harness import Job, start_job
from tests.natural.verdicts import LOOPS, Cut, Exact, Found, Loop, Refused, Told, Warned

pytestmark = pytest.mark.slow

RUN = Path(__file__).parent / "run.py"
_ENVIRONMENT = {"MINDX_GRACE_S": "60"}
_EXACT = [loop for loop in LOOPS if isinstance(loop.verdict, Exact)]
_OFTEN = (
    "stock_workers",
    "stream_shuffle_buffer",
    "list_converted",
    "evaluate_in_loop",
    "noise_generator",
    "ddp_distributed_sampler",
)
"""Those that every run of the tests stops, besides those of docs/your-loop.md; `make drill` stops all, more often."""
_REFUSED = [loop for loop in LOOPS if isinstance(loop.verdict, Refused)]
_CUTS = [(loop, cut) for loop in LOOPS for cut in loop.cuts]
_RESUMED: list[tuple[Loop, Cut | None]] = [
    *((loop, None) for loop in LOOPS if isinstance(loop.verdict, Told)),
    *((loop, cut) for loop, cut in _CUTS if isinstance(cut.verdict, Told)),
]
_STOP = 7
"""In the middle of an epoch."""
_LISTS = {"accumulate_own_count", "stock_workers"}
"""Exact loops with a variable that a resumed run has otherwise, which the line says."""
_TOLD = [(loop, cut) for loop, cut in _CUTS if isinstance(cut.verdict, (Refused, Warned))]


def _proved() -> Iterator[Any]:
    """Each loop and each cut that `prove` must find, and how."""
    pairs: list[tuple[Loop, Cut | None]] = [*((loop, None) for loop in LOOPS), *_CUTS]
    for loop, cut in pairs:
        verdict = cut.verdict if cut else loop.verdict
        found = verdict.found if isinstance(verdict, (Told, Warned)) else verdict
        if isinstance(found, Found):
            name = f"{loop.name}, cut" if cut else loop.name
            yield pytest.param(loop, cut, found, id=name, marks=() if found.often else pytest.mark.drill)


def run(
    loop: Loop, directory: Path, *, stop: int = 0, code: int | None = 0, script: Path | None = None, rank: int = 0
) -> Job:
    """One start of the loop, with `stop`: stopped at that boundary."""
    args: list[object] = [stop, script or loop.path, directory]
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
@pytest.mark.parametrize("loop", _EXACT, ids=lambda loop: loop.name)
def test_a_run_stopped_three_times_ends_with_the_same_numbers(loop: Loop, seed: int, tmp_path: Path) -> None:
    check_exact(loop, tmp_path, seed=seed, stops=3)


def _plays_on(directory: Path, step: int) -> bool:
    """Whether neither the end of an epoch nor its last batch, which a loop may have fetched, comes behind `step`."""
    infos = [read_header(path).info for path in directory.rglob("*.safetensors")]
    return all(info.step_in_epoch + 1 < info.batch_num or not info.batch_num for info in infos if info.step == step)


def _warnings(job: Job) -> list[str]:
    of_a_stop = re.compile("SIGTERM heard|SIGTERM on rank|Graceful exit is triggered")
    return [line for line in job.lines if "WARNING" in line and not of_a_stop.search(line)]


def check_told(loop: Loop, verdict: Told, tmp_path: Path, script: Path) -> None:
    """Stopped in the middle, and resumed: one line says the variable or the cause."""
    run(loop, tmp_path / "told", stop=_STOP, code=143, script=script)
    resumed = run(loop, tmp_path / "told", script=script, code=None)
    lines = [line for line in resumed.lines if "of the stopped process" in line]
    assert any(verdict.words in line for line in lines), f"{verdict.words!r} is not said\n{resumed.report()}"


def check_refused(loop: Loop, verdict: Refused, tmp_path: Path, script: Path) -> None:
    job = run(loop, tmp_path / "refused", code=1, script=script)
    assert any("UnmanagedStateError" in line or "UsageError" in line for line in job.lines), job.report()
    assert any(verdict.words in line for line in job.lines), f"{verdict.words!r} is not said\n{job.report()}"
    assert bool(list((tmp_path / "refused").rglob("*.safetensors"))) == verdict.saves, job.report()


def check_found(loop: Loop, verdict: Found, tmp_path: Path, script: Path) -> None:
    command = [sys.executable, "-m", "mindx_elastic.cli.main", "prove", "--stops", str(verdict.stops), "--seed", "1"]
    command += ["--nproc-per-node", str(loop.ranks)] if loop.ranks > 1 else []
    command += ["--steps", str(verdict.steps)] if verdict.steps else []
    command += ["--", str(script), str(tmp_path / "never")]
    proved = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=_environment())
    shown = " ".join(proved.stdout.split())
    assert proved.returncode != 0, proved.stdout + proved.stderr
    assert verdict.words in shown, f"{verdict.words!r} is not said\n{proved.stdout}{proved.stderr}"
    assert verdict.variable in shown.partition("not got back: ")[2] or not verdict.variable, proved.stdout
    assert not (tmp_path / "never").exists()


def check_warned(loop: Loop, verdict: Warned, tmp_path: Path, script: Path) -> None:
    job = run(loop, tmp_path / "warned", script=script)
    said = [line for line in job.lines if "WARNING" in line]
    assert any(verdict.words in line for line in said), f"{verdict.words!r} is not said\n{job.report()}"


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": "1", "COLUMNS": "500", "PYTHONPATH": root}


@pytest.mark.few(2)
@pytest.mark.parametrize("loop", _REFUSED, ids=lambda loop: loop.name)
def test_what_cannot_be_kept_is_refused(loop: Loop, tmp_path: Path) -> None:
    assert isinstance(loop.verdict, Refused)
    check_refused(loop, loop.verdict, tmp_path, loop.path)


@pytest.mark.drill
@pytest.mark.parametrize(("loop", "cut", "found"), [*_proved()])
def test_prove_finds_what_nothing_else_can_see(loop: Loop, cut: Cut | None, found: Found, tmp_path: Path) -> None:
    check_found(loop, found, tmp_path, loop.path if cut is None else _write_cut(loop, cut, tmp_path))


def _cut_id(value: Any) -> str:
    return value.name if isinstance(value, Loop) else "whole" if value is None else str(value.old).strip()[:30]


def _write_cut(loop: Loop, cut: Cut, tmp_path: Path) -> Path:
    script = tmp_path / f"{loop.name}.py"
    script.write_text(loop.source(cut), encoding="utf-8")
    return script


@pytest.mark.few(3)
@pytest.mark.parametrize(("loop", "cut"), _RESUMED, ids=_cut_id)
def test_what_goes_on_and_is_not_kept_is_told_by_the_first_resume(loop: Loop, cut: Cut | None, tmp_path: Path) -> None:
    verdict = cut.verdict if cut else loop.verdict
    assert isinstance(verdict, Told)
    check_told(loop, verdict, tmp_path, loop.path if cut is None else _write_cut(loop, cut, tmp_path))


@pytest.mark.few(2)
@pytest.mark.parametrize(("loop", "cut"), _TOLD, ids=_cut_id)
def test_a_line_of_state_that_is_taken_away_is_told(loop: Loop, cut: Cut, tmp_path: Path) -> None:
    script = _write_cut(loop, cut, tmp_path)
    if isinstance(cut.verdict, Refused):
        check_refused(loop, cut.verdict, tmp_path, script)
    else:
        assert isinstance(cut.verdict, Warned)
        check_warned(loop, cut.verdict, tmp_path, script)


def test_every_loop_has_a_verdict() -> None:
    files = {path.stem for path in (Path(__file__).parent / "loops").glob("*.py")}
    names = [loop.name for loop in LOOPS]
    assert files == set(names)
    assert len(names) == len(set(names))


def test_few_exact_loops_list_a_variable() -> None:
    assert len(_LISTS) <= len(_EXACT) // 20


def test_every_exact_loop_has_a_cut() -> None:
    assert not [loop.name for loop in _EXACT if not loop.cuts]
