"""What the ends of the workers mean together."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from mindx_elastic.agent.endings import Meaning, StopKind, conclude, describe, meaning, shell_code
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.status_page import Status, WorkerPhase

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)


def end(code: int, rank: int = 0, *, sent: tuple[int, ...] = (), message: str = "") -> WorkerExit:
    """A worker without a guard."""
    return WorkerExit(rank=rank, pid=10 + rank, code=code, sent=frozenset(sent), message=message)


def guarded(
    code: int,
    rank: int = 0,
    *,
    left: int = -1,
    reason: str = "",
    phase: WorkerPhase = WorkerPhase.LEFT,
    sent: tuple[int, ...] = (),
    asked: int = -1,
) -> WorkerExit:
    """One with a guard that says it leaves with `left`; `asked`: the code of a stop that somebody has asked for."""
    status = Status(pid=10 + rank, phase=phase, exit_code=left, reason=reason, asked_code=asked)
    return WorkerExit(rank=rank, pid=10 + rank, code=code, status=status, sent=frozenset(sent))


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (end(0), Meaning.FINISHED),
        (end(1), Meaning.FAILED),
        (end(143), Meaning.LEFT),
        (end(75), Meaning.LEFT),
        (end(-KILL), Meaning.FAILED),
        (end(-TERM), Meaning.FAILED),
        (end(-TERM, sent=(TERM,)), Meaning.ENDED_BY_US),
        (end(-KILL, sent=(TERM,)), Meaning.FAILED),
        (end(1, sent=(TERM,)), Meaning.FAILED),
        (guarded(5, left=5), Meaning.LEFT),
        (guarded(5, left=143), Meaning.FAILED),
        (guarded(1), Meaning.FAILED),
        (guarded(-KILL, phase=WorkerPhase.TRAINING), Meaning.FAILED),
        (guarded(-KILL, left=143, sent=(KILL,)), Meaning.LEFT),
        (guarded(-KILL, left=143), Meaning.LEFT),
        (guarded(-KILL, sent=(KILL,)), Meaning.ENDED_BY_US),
    ],
)
def test_the_end_of_one_worker(worker: WorkerExit, expected: Meaning) -> None:
    assert meaning(worker) is expected


def test_codes_and_causes_for_people() -> None:
    assert (shell_code(3), shell_code(-9), shell_code(0)) == (3, 137, 0)
    assert describe(end(-KILL)) == "killed by SIGKILL"
    assert describe(end(3)) == "exit code 3"
    assert describe(end(1, message="ValueError: x")) == "exit code 1: ValueError: x"
    assert describe(guarded(1, reason="exception: KeyError: 'a'")) == "exit code 1: KeyError: 'a'"


@pytest.mark.parametrize(
    ("saved", "other", "outcome"),
    [(20, "rehearsal at step 20 on rank 0", "rehearsed"), (7, "rehearsal at step 20", "stopped"), (20, "", "stopped")],
)
def test_a_rehearsal_needs_all_ranks_and_their_files(saved: int, other: str, outcome: str) -> None:
    workers = [guarded(75, rank, left=75, reason=("rehearsal at step 20", other)[rank]) for rank in range(2)]
    exits = [replace(one, status=one.status._replace(saved_step=saved)) for one in workers if one.status is not None]
    assert conclude(exits, None).outcome == outcome
    assert conclude(exits, StopKind.SIGNAL, signum=TERM).outcome == "stopped", "the agent was told to stop"


@pytest.mark.parametrize(
    ("workers", "code", "rank", "cause"),
    [
        ([end(-KILL, 1), guarded(75, 0, left=75)], 137, 1, "killed by SIGKILL"),
        ([guarded(75, 0, left=75), end(-KILL, 1)], 137, 1, "killed by SIGKILL"),
        ([end(1, 1), end(-TERM, 0, sent=(TERM,))], 1, 1, "exit code 1"),
        ([end(3, 1), end(1, 0)], 3, 1, "exit code 3"),
        ([end(0, 1), end(2, 0)], 2, 0, "exit code 2"),
    ],
)
def test_the_first_failure_counts(workers: list[WorkerExit], code: int, rank: int, cause: str) -> None:
    for stop in (None, StopKind.FAILURE):
        ending = conclude(workers, stop)
        assert (ending.outcome, ending.code, ending.rank, ending.cause) == ("failed", code, rank, cause)
        assert not ending.elsewhere
    hang = conclude([end(-KILL, 1, sent=(KILL,)), guarded(75, 0, left=75)], StopKind.FAILURE, cause="hang", rank=1)
    assert (hang.outcome, hang.code, hang.rank, hang.cause) == ("failed", 75, 1, "hang"), "whoever was killed for it"


@pytest.mark.parametrize(
    ("code", "reason", "outcome"),
    [
        (75, "rank 3 is gone on rank 2", "failed"),
        (75, "exception: E: x on rank 3", "failed"),
        (75, "ranks 2, 3 are stuck: h", "failed"),
        (143, "SIGTERM on rank 1", "stopped"),
        (75, "flag file /x/graceful_exit.json", "stopped"),
        (75, "fault report: rank 1", "stopped"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["it left", "it was ended in what the script does behind it"])
def test_what_another_node_began_is_the_same_here(code: int, reason: str, outcome: str, is_late: bool) -> None:
    left = guarded(-KILL if is_late else code, left=code, reason=reason, sent=(KILL,) * is_late)
    ending = conclude([left, end(0, 1)], None)
    assert (ending.outcome, ending.code, ending.cause) == (outcome, code, reason)
    assert (ending.elsewhere, ending.rank) == (outcome == "failed", -1)


@pytest.mark.parametrize(
    ("workers", "code"),
    [
        ([guarded(143, left=143), guarded(143, 1, left=143)], 143),
        ([guarded(1), guarded(143, 1, left=143)], 143),
        ([guarded(1, phase=WorkerPhase.STOPPING)], 1),
        ([end(-TERM, sent=(TERM,))], 143),
        ([end(-KILL, sent=(TERM, KILL))], 143),
        ([end(5), end(5, 1)], 5),
        ([end(5), end(-TERM, 1, sent=(TERM,))], 143),
        ([end(0), end(-TERM, 1, sent=(TERM,))], 143),
    ],
)
def test_after_a_signal_to_the_agent(workers: list[WorkerExit], code: int) -> None:
    for stop in (StopKind.SIGNAL, StopKind.FAILURE, StopKind.MEMBERSHIP):
        ending = conclude(workers, stop, signum=TERM, cause="whatever")
        assert (ending.outcome, ending.code, ending.cause) == ("stopped", code, "SIGTERM"), "never a restart"


@pytest.mark.parametrize("stop", [None, StopKind.FAILURE])
@pytest.mark.parametrize(
    "other",
    [
        guarded(75, 1, left=75, reason="flag file /x", asked=75),
        guarded(-KILL, 1, phase=WorkerPhase.STOPPING, reason="flag file /x", sent=(KILL,), asked=75),
    ],
    ids=["it has left", "the agent has ended it"],
)
def test_a_failure_beside_a_stop_that_was_asked_for_restarts_nothing(stop: StopKind | None, other: WorkerExit) -> None:
    ending = conclude([end(-KILL), other], stop, cause="no recovery in place: rank 1: the job is being stopped")
    assert (ending.outcome, ending.code, ending.cause) == ("stopped", 75, "flag file /x")


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGTERM on rank 2", "SIGTERM, after: rank 0 is gone"])
@pytest.mark.parametrize("urged", [False, True])
def test_a_sigterm_beside_a_failure_stops_the_job_unless_the_agent_has_sent_it(reason: str, urged: bool) -> None:
    others = [guarded(143, rank, left=143, reason=reason, sent=(TERM,), asked=143) for rank in (1, 2)]
    ending = conclude([end(-KILL), *(replace(each, urged=urged) for each in others)], StopKind.FAILURE)
    assert (ending.outcome, ending.code) == (("failed", 137) if urged else ("stopped", 143))


def test_a_sigterm_on_another_node_is_that_node_s_to_judge() -> None:
    assert conclude([end(-KILL), guarded(143, 1, left=143, reason="SIGTERM on rank 5", asked=143)], None).code == 137


@pytest.mark.parametrize(
    "other",
    [
        guarded(0, 1, left=0, reason="trained enough", asked=0),
        guarded(75, 1, left=75, reason="rank 0 is gone"),
        guarded(1, 1, reason="exception: ValueError: x", asked=75),
    ],
    ids=["the program says that it has done all", "because of the failure", "it has failed, too"],
)
def test_a_failure_beside_other_ends_restarts_the_job(other: WorkerExit) -> None:
    assert conclude([end(-KILL), other], None).outcome == "failed"
