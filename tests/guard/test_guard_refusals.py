"""What the guard refuses before training starts, and what it leaves behind then: nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.errors import (
    GracefulExit,
    MismatchError,
    NoUsableCheckpointError,
    UsageError,
)
from tests.guarded import Job, stop_at, stopped, weights_of_uninterrupted
from tests.harness import events, wait_until

pytestmark = pytest.mark.usefixtures("clean")


# --- refused before training starts ---


def test_a_second_guard_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    with Job(tmp_path / "a").guard:
        with pytest.raises(UsageError, match="another guard is active"), Job(tmp_path / "b").guard:
            pass
        assert not (tmp_path / "b").exists()
    with Job(tmp_path / "b").guard:
        pass


class FailsByItself(torch.optim.Optimizer):
    """Its mistake is in its own code."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def state_dict(self) -> Any:
        raise KeyError("no such key")


def test_a_refusal_shows_the_users_own_error_and_none_of_our_frames(tmp_path: Path) -> None:
    optimizer = FailsByItself(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(UsageError, match="fails by itself") as caught, Job(tmp_path, optimizer=optimizer).guard:
        pass
    assert isinstance(caught.value.__cause__, KeyError)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file or below a file") as caught, Job(tmp_path / "file" / "ckpt").guard:
        pass
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert [entry.name for entry in caught.traceback][1:] == ["__enter__"]


def test_a_guard_that_is_entered_in_its_own_block_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def enter_again(job: Job, step: int) -> None:
        with pytest.raises(UsageError, match="this guard is active already"), job.guard:
            pass

    job.run(after=enter_again)
    assert [event["outcome"] for event in events(tmp_path, "end")] == ["finished"]


def test_another_thread_is_refused(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            Job(tmp_path).guard.__enter__()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert isinstance(errors[0], UsageError) and "main thread" in str(errors[0]) and "signals=[]" in str(errors[0])
    with Job(tmp_path).guard:
        pass


@pytest.mark.parametrize("way", ["host", "asked"])
def test_a_thread_whose_host_answers_signals_trains_stops_and_resumes(tmp_path: Path, way: str) -> None:
    """Ray Train runs the loop in a thread, and has a SIGTERM handler. `asked`: ``signals=[]``."""

    def stop(job: Job, step: int) -> None:
        if step == 7:
            job.guard.stopper.request("the pool shrinks", 75)
            wait_until(lambda: job.guard.stopper.agreed_step is not None, "the agreement")

    def train(**hooks: Any) -> tuple[Job, list[object]]:
        options: dict[str, Any] = {"signals": []} if way == "asked" else {}
        job = Job(tmp_path / "job", **options)
        codes: list[object] = []

        def run() -> None:
            try:
                job.run(**hooks)
            except GracefulExit as error:
                codes.append(error.code)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return job, codes

    before = signal.getsignal(signal.SIGTERM)
    if way == "host":
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        assert train(middle=stop)[1] == [75]
        resumed, codes = train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (resumed.guard.resumed_from_step, codes) == (7, [])
    found, expected = resumed.weights(), weights_of_uninterrupted(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        *(({"grace_s": value}, "grace_s=") for value in (0, -1, True, "30", float("nan"), float("inf"))),
        ({"signals": [signal.SIGKILL]}, "cannot be caught"),
        ({"prefix": "../job"}, "prefix"),
    ],
)
def test_wrong_arguments_are_refused_before_training(tmp_path: Path, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Job(tmp_path, **wrong).run()


def test_a_changed_model_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    stopped(Job(tmp_path), middle=stop_at(2))
    job = Job(tmp_path, model=nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)))
    with pytest.raises(MismatchError, match=r"0\.weight has shape \[8, 4\] there and \[9, 4\] here"):
        job.run()
    assert job.steps == [] and len(list(tmp_path.glob("*.safetensors"))) == 1


def test_damaged_files_are_never_a_fresh_start(tmp_path: Path) -> None:
    path = stopped(Job(tmp_path), middle=stop_at(2)).path
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(NoUsableCheckpointError):
        Job(tmp_path).run()
    job = Job(tmp_path, resume="never")
    job.run()
    assert job.steps[0] == 1 and job.guard.resumed_from_step is None
