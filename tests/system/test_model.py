"""`Model` and the documented callbacks in real processes: stop, run the same command again, equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, events, run_job, start_job
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow


def assert_same_end(reference: Job, resumed: Job) -> None:
    """Weights, the callback's counter and the last epoch's evaluation are those of the uninterrupted run."""
    assert resumed.hashes() == reference.hashes(), resumed.report()
    for pattern in (r"(STEPS \d+ \d+)", r"(EVAL 3 \d+ [\d.]+)"):
        expected = sorted(m[1] for m in reference.matches(pattern))
        assert sorted(m[1] for m in resumed.matches(pattern)) == expected, resumed.report()


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        pytest.param(1, ("--num-workers", 2), marks=pytest.mark.drill),
        pytest.param(1, ("--plain-loader",), marks=pytest.mark.drill),
        pytest.param(1, ("--gan",), marks=pytest.mark.drill),
        pytest.param(3, ("--grad-accum", 2), marks=pytest.mark.drill),
        (2, ("--rank0-only", "--save-steps", 2, "--async-save")),
    ],
)
def test_sigterm(tmp_path: Path, uninterrupted: Uninterrupted, ranks: int, args: tuple[object, ...]) -> None:
    with start_job("train_model.py", tmp_path, "--hold-at", 4, *args, ranks=ranks) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(ranks - 1)
        job.expect(143 if ranks == 1 else 1)
    steps = {event["rank"]: event["step"] for event in events(tmp_path, "durable")}
    assert sorted(steps) == list(range(ranks)), job.report()
    assert len(set(steps.values())) == 1, job.report()
    assert len(list(tmp_path.rglob("net-*_breakpoint.safetensors"))) == ranks
    if "--rank0-only" in args:
        assert job.matches("was given to rank 0 only")
    assert_same_end(
        uninterrupted("train_model.py", ranks, *args), run_job("train_model.py", tmp_path, *args, ranks=ranks)
    )


@pytest.mark.drill
def test_sigterm_in_an_evaluation_between_two_epochs(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    with start_job("train_model.py", tmp_path, "--hold-in-eval", 1, ranks=2) as job:
        job.wait_for("HOLD", count=2)
        job.signal_rank(0)
        job.expect(1)
    assert {event["step"] for event in events(tmp_path, "durable")} == {9}, job.report()
    resumed = run_job("train_model.py", tmp_path, ranks=2)
    assert resumed.matches("EVAL 1 0"), "the evaluation that was cut off is done after the resume"
    assert_same_end(uninterrupted("train_model.py", 2), resumed)


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_long_evaluation_in_mid_epoch_is_cut_off_by_the_deadline_and_done_again(
    tmp_path: Path, uninterrupted: Uninterrupted, ranks: int
) -> None:
    """It would outlive the grace period: the step is saved without its hooks, and these run again after the resume."""
    with start_job(
        "train_model.py", tmp_path, "--hold-in-step-eval", 6, ranks=ranks, env={"MINDX_GRACE_S": "8"}
    ) as job:
        job.wait_for("HOLD", count=ranks)
        job.signal_rank(ranks - 1)
        job.expect(143 if ranks == 1 else 1)
    assert {event["step"] for event in events(tmp_path, "durable")} == {6}, job.report()
    resumed = run_job("train_model.py", tmp_path, ranks=ranks)
    assert len(resumed.matches("step 6: its on_train_step_end callbacks had not ended")) == 1, resumed.report()
    assert_same_end(uninterrupted("train_model.py", ranks), resumed)
    done = sorted(m[1] for m in [*job.matches(r"(STEP_EVAL .*)"), *resumed.matches(r"(STEP_EVAL .*)")])
    assert done == sorted(m[1] for m in uninterrupted("train_model.py", ranks).matches(r"(STEP_EVAL .*)")), (
        resumed.report()
    )


def test_without_a_guard_an_error_of_one_rank_is_heard_before_the_others_train() -> None:
    """They would hang in the first collective until it times out."""
    job = run_job("unguarded.py", ranks=2)
    refused = {int(m[1]): m[2] for m in job.matches(r"REFUSED (\d) (.*)")}
    assert refused == {
        0: "0 PeerStartError rank 1 could not start: RuntimeError: injected behind the meeting",
        1: "0 RuntimeError injected behind the meeting",
    }, job.report()
    assert sorted(m[0] for m in job.matches(r"TRAINED .*")) == ["TRAINED 0 2", "TRAINED 1 2"], job.report()
