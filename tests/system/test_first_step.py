"""A rank fails in the first step of an attempt, when the others can finish it: the step that the attempt began at is
whole on disk, but of the attempt before. The next start has to go on exactly all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.persist.format import read_header
from tests.harness import Job, run_job, start_job
from tests.system.conftest import Reference

pytestmark = pytest.mark.slow
drill = pytest.mark.drill


def stop_at(directory: Path, ranks: int, step: int, *args: object, env: dict[str, str]) -> None:
    """A graceful stop: the step is whole on disk."""
    with start_job("loop.py", directory, "--hold-at", step - 1, *args, ranks=ranks, env=env) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(0)
        job.expect(1)  # torchrun's; each rank leaves with 143
    assert moments(directory) == {(rank, 0, step) for rank in range(ranks)}, job.report()


def moments(directory: Path) -> set[tuple[int, int, int]]:
    """Rank, attempt and step of every file on disk."""
    infos = [read_header(path).info for path in directory.rglob("*.safetensors")]
    return {(info.rank, info.attempt, info.step) for info in infos}


def resumed_from(job: Job) -> set[str]:
    return {m[1] for m in job.matches(r"READY \d+ \d+ (\w+)")}


@drill
@pytest.mark.parametrize(
    ("ranks", "victim", "how"),
    [
        (2, 1, "raise"),
        pytest.param(2, 1, "kill", marks=drill),
        pytest.param(2, 0, "raise", marks=drill),
        pytest.param(2, 0, "kill", marks=drill),
        pytest.param(3, 2, "kill", marks=drill),
        pytest.param(4, 0, "raise", marks=drill),
    ],
)
@pytest.mark.parametrize("memory", [True, pytest.param(False, marks=drill)])
def test_the_step_that_an_attempt_began_at_is_exact_and_goes_first(
    tmp_path: Path, reference: Reference, ranks: int, victim: int, how: str, memory: bool
) -> None:
    directory, arenas = tmp_path / "ckpt", tmp_path / "shm"
    arenas.mkdir()
    env = {"MINDX_ARENA_DIR": str(arenas) if memory else "none", "MINDX_SNAPSHOT_EVERY": "0"}
    stop_at(directory, ranks, 6, env=env)
    fault: tuple[object, ...] = ("--kill", f"update:7:{victim}")
    if how == "raise":
        fault = ("--fail-at", 7, "--fail-rank", victim, "--fail-where", "backward", "--fail-resumed")
    job = run_job("loop.py", directory, *fault, ranks=ranks, env=env, code=1)
    assert resumed_from(job) == {"6"}, job.report()
    assert job.matches("KILLED in update 7" if how == "kill" else "RuntimeError: injected after backward")
    survivors = {(rank, 1, 7) for rank in range(ranks) if rank != victim}
    finished = moments(directory) & survivors
    # A killed rank's sockets are cut: of two others, one may be told of that before it has its last gradients.
    enough = finished == survivors if how == "raise" else finished
    assert enough, f"the others did not finish the step\n{job.report()}"
    again = run_job("loop.py", directory, ranks=ranks, env=env)
    assert not again.matches("random numbers start over"), again.report()
    assert again.hashes() == reference(ranks).hashes(), f"{job.report()}\n{again.report()}"
