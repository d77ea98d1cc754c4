"""Jobs of Lightning and Accelerate, stopped by a real signal and started again: as one that was never stopped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import Job, run_job

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytestmark = pytest.mark.slow

_WRITTEN = r"^(STEP|MEAN|VALUE|EVAL|HASH) .*"
_PID = re.compile(r"^((?:STEP|MEAN|VALUE) \S+ \S+) \d+ ")


def written(*jobs: Job) -> list[str]:
    """What the jobs have written of their training, each line once, without process ids."""
    lines = {_PID.sub(r"\1 ", match[0]) for job in jobs for match in job.matches(_WRITTEN)}
    return sorted(lines)


def run(script: str, directory: Path, ranks: int, options: Sequence[str] = (), code: int = 0) -> Job:
    return run_job(f"integrations_{script}.py", directory, *options, ranks=ranks, code=code, fresh=True)


def check(script: str, tmp_path: Path, ranks: int, stop: Sequence[str], options: Sequence[str] = ()) -> None:
    """The stopped and resumed job has written what the uninterrupted one has."""
    straight = run(script, tmp_path / "straight", ranks, options)
    stopped = run(script, tmp_path / "stopped", ranks, [*options, *stop], code=143 if ranks == 1 else 1)
    assert not stopped.matches("^HASH"), f"the stop came too late\n{stopped.report()}"
    resumed = run(script, tmp_path / "stopped", ranks, options)
    assert resumed.matches(r"resumed from .*saved because of SIGTERM"), resumed.report()
    assert written(stopped, resumed) == written(straight), f"{stopped.report()}\n{resumed.report()}"


ACCELERATE = [
    pytest.param(1, ["--stop-at", "7"], ["--evaluate", "--accumulate", "3"], id="accumulation"),
    pytest.param(2, ["--stop-at", "4", "--stop-rank", "1"], ["--evaluate"], id="2 ranks"),
    pytest.param(1, ["--stop-at", "10"], ["--evaluate"], id="end of an epoch", marks=pytest.mark.drill),
    pytest.param(1, ["--stop-at", "6"], ["--workers", "2"], id="workers", marks=pytest.mark.drill),
    pytest.param(2, ["--stop-at", "7"], ["--split", "--workers", "1"], id="split batches", marks=pytest.mark.drill),
    pytest.param(
        3, ["--stop-at", "3", "--stop-rank", "2"], ["--samples", "100"], id="3 ranks", marks=pytest.mark.drill
    ),
]


@pytest.mark.parametrize(("ranks", "stop", "options"), ACCELERATE)
def test_a_loop_with_accelerate_goes_on_where_it_was_stopped(
    tmp_path: Path, ranks: int, stop: list[str], options: list[str]
) -> None:
    check("accelerate", tmp_path, ranks, stop, options)


_BEST = ["--best", "--plateau"]
LIGHTNING = [
    pytest.param(1, ["--stop-at", "7"], ["--validate", "0.5", *_BEST], id="mid-epoch", marks=pytest.mark.drill),
    pytest.param(
        1, ["--stop-at", "5", "--stop-in-validation"], ["--validate", "0.5", *_BEST], id="in a validation in mid-epoch"
    ),
    pytest.param(2, ["--stop-at", "3", "--stop-rank", "1"], [], id="2 ranks"),
    pytest.param(1, ["--stop-at", "10"], _BEST[1:], id="last step of an epoch", marks=pytest.mark.drill),
    pytest.param(
        1,
        ["--stop-at", "10", "--stop-in-validation"],
        ["--validate", "1.0", *_BEST],
        id="in the validation at an epoch's end",
        marks=pytest.mark.drill,
    ),
    pytest.param(
        1, ["--stop-at", "14"], ["--accumulate", "3", "--workers", "2"], id="accumulation", marks=pytest.mark.drill
    ),
    pytest.param(
        2,
        ["--stop-at", "5", "--stop-in-validation"],
        ["--validate", "1.0", *_BEST],
        id="2 ranks, in a validation",
        marks=pytest.mark.drill,
    ),
]


@pytest.mark.parametrize(("ranks", "stop", "options"), LIGHTNING)
def test_a_fit_of_lightning_goes_on_where_it_was_stopped(
    tmp_path: Path, ranks: int, stop: list[str], options: list[str]
) -> None:
    check("lightning", tmp_path, ranks, stop, options)


@pytest.mark.drill
def test_a_fit_that_ends_with_an_exception_goes_on_in_front_of_its_step(tmp_path: Path) -> None:
    straight = run("lightning", tmp_path / "straight", 1)
    failed = run("lightning", tmp_path / "failed", 1, ["--raise-at", "8"], code=1)
    assert failed.matches("a fault of the program")
    resumed = run("lightning", tmp_path / "failed", 1)
    assert resumed.matches(r"resumed from .*step 7")
    assert written(failed, resumed) == written(straight)


@pytest.mark.drill
def test_a_program_without_a_seed_goes_on_in_the_order_that_it_began_with(tmp_path: Path) -> None:
    run("lightning", tmp_path, 1, ["--unseeded", "--stop-at", "4"], code=143)
    resumed = run("lightning", tmp_path, 1, ["--unseeded"])
    assert resumed.matches(r"resumed from .*step [45] ") and resumed.matches("^STEP 30 ")
