"""`Model`, its callbacks and TTP in real processes: stop, run the same command again, and end with equal weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Job, events, run_job, start_job
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow
drill = pytest.mark.drill
JOB = "train_model.py"
TFT = {"MS_ENABLE_TFT": "{TTP:1}", "MINDIO_FOR_MINDSPORE": "1"}


def drilled(*values: object) -> Any:
    return pytest.param(*values, marks=drill)


def stop(directory: Path, *args: object, ranks: int, target: int, env: dict[str, str] | None = None) -> tuple[Job, int]:
    """A job that got a SIGTERM where it holds, and the one step that all ranks have saved."""
    with start_job(JOB, directory, *args, ranks=ranks, env=env) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(target)
        job.expect(143 if ranks == 1 else 1)
    steps = {event["rank"]: event["step"] for event in events(directory, "durable")}
    assert sorted(steps) == list(range(ranks)) and len(set(steps.values())) == 1, job.report()
    return job, steps[0]


def assert_same_end(reference: Job, resumed: Job) -> None:
    """Weights, the callback's counter and the last epoch's evaluation are those of the uninterrupted run."""
    assert resumed.hashes() == reference.hashes(), resumed.report()
    for pattern in (r"(STEPS \d+ \d+)", r"(EVAL 3 \d+ [\d.]+)"):
        expected = sorted(m[1] for m in reference.matches(pattern))
        assert sorted(m[1] for m in resumed.matches(pattern)) == expected, resumed.report()


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (2, ("--save-steps", 2, "--async-save")),
        drilled(1, ("--num-workers", 2)),
        drilled(1, ("--plain-loader",)),
        drilled(1, ("--gan",)),
        drilled(3, ("--grad-accum", 2)),
    ],
)
def test_sigterm(tmp_path: Path, uninterrupted: Uninterrupted, ranks: int, args: tuple[object, ...]) -> None:
    stop(tmp_path, "--hold-at", 4, *args, ranks=ranks, target=ranks - 1)
    assert len(list(tmp_path.rglob("net-*_breakpoint.safetensors"))) == ranks
    assert_same_end(uninterrupted(JOB, ranks, *args), run_job(JOB, tmp_path, *args, ranks=ranks))


@drill
def test_sigterm_in_an_evaluation_between_two_epochs(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    job, step = stop(tmp_path, "--hold-in-eval", 1, ranks=2, target=0)
    assert step == 9, job.report()
    resumed = run_job(JOB, tmp_path, ranks=2)
    assert resumed.matches("EVAL 1 0"), "the evaluation that was cut off is done after the resume"
    assert_same_end(uninterrupted(JOB, 2), resumed)


@drill
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_long_evaluation_in_mid_epoch_is_cut_off_by_the_deadline_and_done_again(
    tmp_path: Path, uninterrupted: Uninterrupted, ranks: int
) -> None:
    """It would outlive the grace period: the step is saved without its hooks, and these run again after the resume."""
    args, env = ("--hold-in-step-eval", 6), {"MINDX_GRACE_S": "8"}
    job, step = stop(tmp_path, *args, ranks=ranks, target=ranks - 1, env=env)
    assert step == 6, job.report()
    resumed, whole = run_job(JOB, tmp_path, ranks=ranks), uninterrupted(JOB, ranks)
    assert len(resumed.matches("step 6: its on_train_step_end callbacks had not ended")) == 1, resumed.report()
    assert_same_end(whole, resumed)
    done = sorted(m[1] for m in [*job.matches(r"(STEP_EVAL .*)"), *resumed.matches(r"(STEP_EVAL .*)")])
    assert done == sorted(m[1] for m in whole.matches(r"(STEP_EVAL .*)")), resumed.report()


@drill
def test_a_rank_that_is_killed_in_an_evaluation_in_mid_epoch_costs_nothing(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """Its boundary was passed: what it has of its own there is in memory, and all ranks evaluate again."""
    with start_job(JOB, tmp_path, "--hold-in-step-eval", 6, ranks=2) as job:
        job.wait_for("HOLD", count=2)
        job.signal_rank(1, signal.SIGKILL)
        job.expect(1)
    resumed, whole = run_job(JOB, tmp_path, ranks=2), uninterrupted(JOB, 2)
    assert len(resumed.matches("step 6: its on_train_step_end callbacks had not ended")) == 1, resumed.report()
    assert not resumed.matches("may differ")
    assert_same_end(whole, resumed)


@drill
def test_without_a_guard_an_error_of_one_rank_is_heard_before_the_others_train() -> None:
    """They would hang in the first collective until it times out."""
    job = run_job(JOB, "none", "--unguarded", ranks=2)
    refused = {int(m[1]): m[2] for m in job.matches(r"REFUSED (\d) (.*)")}
    assert refused == {
        0: "0 PeerStartError rank 1 could not start: RuntimeError: injected behind the meeting",
        1: "0 RuntimeError injected behind the meeting",
    }, job.report()
    assert sorted(m[0] for m in job.matches(r"TRAINED .*")) == ["TRAINED 0 9", "TRAINED 1 9"], job.report()


# --- TTP: the documented tree, and the same command goes on from it ---


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.safetensors"))


def documented(step: int, *ranks: int) -> list[str]:
    """Of a step in epoch 1."""
    folder = f"tft_saved_checkpoints-step_{step}"
    return [f"{folder}/rank_{rank}/ttp_rank_{rank}-1_{step}.safetensors" for rank in ranks]


def resume_with_tft(directory: Path, ranks: int, step: int) -> Job:
    job = run_job(JOB, directory, "--tft", ranks=ranks, env=TFT)
    assert job.resumed() == [str(step)] * ranks, job.report()
    return job


@drill
@pytest.mark.parametrize(("ranks", "fail_rank"), [(1, 0), (2, 1), (3, 0)])
def test_ttp_at_an_exception(tmp_path: Path, uninterrupted: Uninterrupted, ranks: int, fail_rank: int) -> None:
    args = ("--tft", "--fail-at", 5, "--fail-rank", fail_rank)
    job = run_job(JOB, tmp_path, *args, ranks=ranks, env=TFT, code=1)
    assert tree(tmp_path) == documented(5, *range(ranks)), job.report()
    assert [path.name for path in tmp_path.glob("tft_*")] == ["tft_saved_checkpoints-step_5"]
    assert resume_with_tft(tmp_path, ranks, 5).hashes() == uninterrupted(JOB, ranks).hashes()


@drill
def test_ttp_at_a_sigterm(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    job, step = stop(tmp_path, "--tft", "--hold-at", 4, ranks=2, target=1, env=TFT)
    assert tree(tmp_path) == documented(step, 0, 1), job.report()
    assert resume_with_tft(tmp_path, 2, step).hashes() == uninterrupted(JOB, 2).hashes()


@pytest.mark.parametrize(("ranks", "killed"), [(2, 0), drilled(3, 0), drilled(3, 1)])
def test_ttp_of_a_killed_rank(tmp_path: Path, uninterrupted: Uninterrupted, ranks: int, killed: int) -> None:
    """Also rank 0, on which MindIO's controller would run."""
    with start_job(JOB, tmp_path, "--tft", "--hold-at", 4, ranks=ranks, env=TFT) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(killed, signal.SIGKILL)
        job.expect(1)
    assert tree(tmp_path) == documented(4, *(rank for rank in range(ranks) if rank != killed)), job.report()
    resumed = resume_with_tft(tmp_path, ranks, 4)
    assert resumed.hashes() == uninterrupted(JOB, ranks).hashes(), resumed.report()


@drill
def test_ttp_of_a_killed_rank_without_replicas_is_refused(tmp_path: Path) -> None:
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


@drill
def test_ttp_without_its_switch_does_not_start(tmp_path: Path) -> None:
    failed = run_job(JOB, tmp_path, "--tft", code=1)
    words = r"UsageError: OptTFTWrapper is switched on by the environment: export MS_ENABLE_TFT='\{TTP:1\}'"
    assert failed.matches(words), failed.report()
