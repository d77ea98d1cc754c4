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


def test_another_step_begins_a_new_row() -> None:
    bug = replace(BUG, boundaries=5)
    later = replace(bug, step=106, boundaries=6)
    assert actions([bug, bug, later, bug, bug, later, later, bug]) == ["restart"] * 8


def test_a_failure_that_was_saved_where_it_happened() -> None:
    first = replace(BUG, boundaries=105, resumed_step=-1, resumed_path="")
    again = replace(BUG, resumed_step=105, resumed_path="a/105_breakpoint")
    assert actions([first, again, again]) == ["restart", "restart", "stop"]


def test_zero_switches_it_off() -> None:
    assert set(actions([BUG] * 20 + [BAD_FILE] * 20, repeats=0)) == {"restart"}


def test_nothing_is_judged_where_no_step_is_known() -> None:
    plain = Failure(cause="exit code 1", step=-1, guarded=False)
    assert set(actions([plain] * 20)) == {"restart"}


def test_a_crash_before_the_first_step_of_a_fresh_start() -> None:
    verdicts = judge_all([Failure(cause="killed by SIGKILL", step=-1)] * 3)
    assert [verdict.action for verdict in verdicts] == ["restart", "restart", "stop"]
    assert "before the first step was done" in verdicts[2].explanation and "a fresh start" in verdicts[2].explanation


def test_resumes_of_one_checkpoint_that_pass_no_step_say_how_to_go_on_from_an_older_one() -> None:
    text = judge_all([BAD_FILE] * 3)[2].explanation
    assert BAD_FILE.resumed_path in text and "move all files of step 100" in text


def test_another_checkpoint_in_between_clears_the_first() -> None:
    other = replace(BAD_FILE, resumed_step=90, step=90, resumed_path="90")
    assert actions([BAD_FILE, BAD_FILE, other, BAD_FILE, BAD_FILE]) == ["restart"] * 5


FAILURES = st.builds(
    Failure,
    cause=st.sampled_from(["killed by SIGKILL", "killed by SIGSEGV", "exit code 1: ValueError: 3"]),
    step=st.integers(-1, 4),
    resumed_step=st.integers(-1, 4),
    resumed_path=st.sampled_from(["", "a", "b"]),
    boundaries=st.integers(0, 2),
    guarded=st.booleans(),
)


@given(st.lists(FAILURES, max_size=40), st.integers(1, 4))
def test_no_verdict_without_its_reasons(failures: list[Failure], repeats: int) -> None:
    loop = CrashLoop(repeats)
    judged: list[Failure] = []
    for failure in failures:
        verdict = loop.judge(failure)
        judged += [failure] if failure.guarded else []
        last = judged[-repeats:]
        if verdict.action == "stop":
            assert len(last) == repeats and len({each.step for each in last}) == 1
        assert bool(verdict.explanation) == (verdict.action != "restart")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=60))
def test_kills_of_a_job_that_advances_never_stop_it(kills: list[int]) -> None:
    loop, step = CrashLoop(3), 0
    for boundaries in kills:
        failure = replace(KILL, resumed_step=step, step=step + boundaries, boundaries=boundaries)
        assert loop.judge(failure).action == "restart"
        step = failure.step


@pytest.mark.parametrize("name", ["UsageError", "UnsafeDirectoryError", "UnsupportedStateError"])
def test_an_error_that_no_restart_can_mend_stops_the_job_at_once(name: str) -> None:
    for cause in (f"exit code 1: {name}: call init_process_group()", f"exit code 1: PeerStartError: rank 1: {name}: x"):
        verdict = CrashLoop().judge(replace(BUG, cause=cause, guarded=False))
        assert verdict.action == "stop" and verdict.explanation
    full = "exit code 1: SaveError: /data/ckpt: cannot write there: No space left on device; check its free space"
    assert CrashLoop().judge(replace(BUG, cause=full, guarded=False)).action == "stop"
    other = replace(BUG, cause=f"exit code 1: click.exceptions.{name}: no such option")
    assert CrashLoop().judge(other).action == "restart"
