"""Whether another restart is allowed, and can help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agent.restarts import CrashLoop, Failure, Restarts, RestartVerdict


def test_none() -> None:
    restarts = Restarts(0)
    assert not restarts.take(0.0)
    assert restarts.why_not == "--max-restarts is 0"


BUG = Failure(cause="exit code 1: ValueError: bad sample", step=105, resumed_step=100, resumed_path="a/100")
KILL = Failure(cause="killed by SIGKILL", step=7, resumed_step=5, resumed_path="a/5", boundaries=2)
BAD_FILE = Failure(cause="killed by SIGSEGV", step=100, resumed_step=100, resumed_path="ckpt/rank_1/n-2_40.st")


def judge_all(failures: list[Failure], repeats: int = 3) -> list[RestartVerdict]:
    loop = CrashLoop(repeats)
    return [loop.judge(failure) for failure in failures]


def actions(failures: list[Failure], repeats: int = 3) -> list[str]:
    return [verdict.action for verdict in judge_all(failures, repeats)]


@pytest.mark.parametrize(
    "causes", [(BUG.cause,) * 3, (BUG.cause, "killed by SIGSEGV", "exit code 1: RuntimeError: reset")]
)
def test_failures_at_the_same_step_stop_the_job_whatever_their_causes(causes: tuple[str, ...]) -> None:
    verdicts = judge_all([replace(BUG, boundaries=5, cause=cause) for cause in causes])
    assert [verdict.action for verdict in verdicts] == ["restart", "restart", "stop"]
    assert verdicts[0].explanation == ""
    text = verdicts[2].explanation
    assert "3 attempts in a row failed at the same step" in text and all(cause in text for cause in causes)
    assert "after step 105, so in step 106 or on the way to it" in text and BUG.resumed_path in text
    assert "start the same command again" in text and "move all files" not in text


def test_a_crash_before_the_first_step_is_not_called_a_fresh_start() -> None:
    """The start itself may have been refused: NoUsableCheckpointError."""
    verdicts = judge_all([Failure(cause="killed by SIGKILL", step=-1)] * 3)
    assert [verdict.action for verdict in verdicts] == ["restart", "restart", "stop"]
    assert "before the first step was done" in verdicts[2].explanation and "none was loaded" in verdicts[2].explanation


def test_resumes_of_one_checkpoint_that_pass_no_step_say_how_to_go_on_from_an_older_one() -> None:
    text = judge_all([BAD_FILE] * 3)[2].explanation
    assert BAD_FILE.resumed_path in text and "move all files of step 100" in text


FAILURES = st.builds(
    Failure,
    cause=st.sampled_from(["killed by SIGKILL", "killed by SIGSEGV", "exit code 1: ValueError: 3"]),
    step=st.integers(-1, 4),
    resumed_step=st.integers(-1, 4),
    resumed_path=st.sampled_from(["", "a", "b"]),
    boundaries=st.integers(0, 2),
    guarded=st.booleans(),
)


@given(st.lists(FAILURES, max_size=40), st.integers(0, 4))
def test_as_many_in_a_row_at_one_step_stop_it_and_nothing_else_does(failures: list[Failure], repeats: int) -> None:
    """Without a guard no step is known, and nothing is judged; 0 switches it off."""
    loop = CrashLoop(repeats)
    judged: list[Failure] = []
    for failure in failures:
        verdict = loop.judge(failure)
        judged += [failure] if failure.guarded else []
        last = judged[-repeats:] if repeats else []
        is_loop = failure.guarded and len(last) == repeats > 0 and len({each.step for each in last}) == 1
        assert verdict.action == ("stop" if is_loop else "restart")
        assert bool(verdict.explanation) == is_loop


@pytest.mark.parametrize("name", ["UsageError", "UnsafeDirectoryError", "UnsupportedStateError"])
def test_an_error_that_no_restart_can_mend_stops_the_job_at_once(name: str) -> None:
    for cause in (f"exit code 1: {name}: call init_process_group()", f"exit code 1: PeerStartError: rank 1: {name}: x"):
        verdict = CrashLoop().judge(replace(BUG, cause=cause, guarded=False))
        assert verdict.action == "stop" and verdict.explanation
    full = "exit code 1: SaveError: /data/ckpt: cannot write there: No space left on device; check its free space"
    assert CrashLoop().judge(replace(BUG, cause=full, guarded=False)).action == "stop"
    other = replace(BUG, cause=f"exit code 1: click.exceptions.{name}: no such option")
    assert CrashLoop().judge(other).action == "restart"
