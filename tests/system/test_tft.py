"""TTP in real processes, under plain torchrun: the documented tree, and the same command goes on from it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness import Job, events, run_job, start_job
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow
TFT = {"MS_ENABLE_TFT": "{TTP:1}", "MINDIO_FOR_MINDSPORE": "1"}


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.safetensors"))


def documented(step: int, epoch: int, step_in_epoch: int, *ranks: int) -> list[str]:
    folder = f"tft_saved_checkpoints-step_{step}"
    return [f"{folder}/rank_{rank}/ttp_rank_{rank}-{epoch}_{step_in_epoch}.safetensors" for rank in ranks]


def resume(directory: Path, ranks: int, step: int) -> Job:
    job = run_job("train_model.py", directory, "--tft", ranks=ranks, env=TFT)
    assert [m[1] for m in job.matches(r"READY \d \d+ (\w+)")] == [str(step)] * ranks, job.report()
    return job


@pytest.mark.parametrize(
    ("ranks", "fail_rank"),
    [(1, 0), pytest.param(2, 1, marks=pytest.mark.drill), pytest.param(3, 0, marks=pytest.mark.drill)],
)
def test_an_exception(tmp_path: Path, uninterrupted: Uninterrupted, ranks: int, fail_rank: int) -> None:
    args = ("--tft", "--fail-at", 5, "--fail-rank", fail_rank)
    job = run_job("train_model.py", tmp_path, *args, ranks=ranks, env=TFT, code=1)
    per_epoch = {1: 18, 2: 9, 3: 6}[ranks]
    assert tree(tmp_path) == documented(5, (5 - 1) // per_epoch + 1, 5, *range(ranks)), job.report()
    assert [path.name for path in tmp_path.glob("tft_*")] == ["tft_saved_checkpoints-step_5"]
    assert resume(tmp_path, ranks, 5).hashes() == uninterrupted("train_model.py", ranks).hashes()


@pytest.mark.drill
def test_sigterm(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    with start_job("train_model.py", tmp_path, "--tft", "--hold-at", 4, ranks=2, env=TFT) as job:
        job.wait_for("HOLD", count=2)
        job.signal_rank(1)
        job.expect(1)
    (step,) = {event["step"] for event in events(tmp_path, "durable")}
    assert tree(tmp_path) == documented(step, 1, step, 0, 1), job.report()
    assert resume(tmp_path, 2, step).hashes() == uninterrupted("train_model.py", 2).hashes()


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "killed"), [(2, 0), (3, 0), (3, 1)])
def test_a_killed_rank(tmp_path: Path, uninterrupted: Uninterrupted, ranks: int, killed: int) -> None:
    """Also rank 0, on which MindIO's controller would run."""
    with start_job("train_model.py", tmp_path, "--tft", "--hold-at", 4, ranks=ranks, env=TFT) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(killed, signal.SIGKILL)
        job.expect(1)
    good = [rank for rank in range(ranks) if rank != killed]
    assert tree(tmp_path) == documented(4, 1, 4, *good), job.report()
    resumed = resume(tmp_path, ranks, 4)
    assert resumed.hashes() == uninterrupted("train_model.py", ranks).hashes(), resumed.report()


@pytest.mark.drill
def test_a_killed_rank_without_replicas_is_refused(tmp_path: Path) -> None:
    """Each rank holds a part of its own: the survivors' parts alone are no state."""
    with start_job("fsdp.py", tmp_path, "--tft", "--hold-at", 5, ranks=2, env=TFT) as job:
        job.wait_for("HOLD", count=2)
        job.signal_rank(1, signal.SIGKILL)
        job.expect(1)
    assert job.matches("rank 1 is gone and no other rank holds the same state: there is no consistent replica")
    outcomes = {event["outcome"] for event in events(tmp_path, "save") if event["rank"] == 0}
    assert outcomes == {"refused: no consistent replica"}, job.report()
    assert {event["outcome"] for event in events(tmp_path, "exit") if event["rank"] == 0} == {"75"}
    assert not any(name.startswith("tft_") for name in tree(tmp_path)), job.report()


def test_without_its_switch_the_job_does_not_start(tmp_path: Path) -> None:
    failed = run_job("train_model.py", tmp_path, "--tft", code=1)
    assert failed.matches(
        r"UsageError: OptTFTWrapper is switched on by the environment: export MS_ENABLE_TFT='\{TTP:1\}'"
    )
