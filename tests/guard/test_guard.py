"""The guard in one process, with real signals to this very process in the middle of a step."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.errors import (
    SaveError,
    UsageError,
)
from mindx_elastic.guard import saver as saving_module
from mindx_elastic.persist.format import read_header
from tests.capture.round_trip import assert_same
from tests.guarded import (
    STEPS_PER_EPOCH,
    Job,
    fail_at,
    stop_and_wait,
    stop_at,
    stopped,
    weights_of_uninterrupted,
)
from tests.harness import events

pytestmark = pytest.mark.usefixtures("clean")


# --- stop and resume ---


@pytest.mark.parametrize("number", [1, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1])
def test_a_signal_in_mid_step_stops_at_the_coming_boundary_and_resumes_bit_for_bit(tmp_path: Path, number: int) -> None:
    expected = weights_of_uninterrupted(tmp_path)
    first = Job(tmp_path)
    leaving = stopped(first, middle=stop_at(number))
    assert (leaving.code, leaving.reason, leaving.step) == (143, "SIGTERM", number)
    assert leaving.path is not None and leaving.path.parent == tmp_path
    epoch, in_epoch = (number - 1) // STEPS_PER_EPOCH + 1, (number - 1) % STEPS_PER_EPOCH + 1
    assert leaving.path.name == f"job-{epoch}_{in_epoch}_breakpoint.safetensors"
    info = read_header(leaving.path).info
    assert (info.step, info.epoch, info.step_in_epoch, info.batch_num) == (number, epoch, in_epoch, STEPS_PER_EPOCH)
    assert (info.reason, info.kind, info.resumable) == ("SIGTERM", "breakpoint", True)
    (durable,) = events(tmp_path, "durable")
    assert (durable["step"], durable["path"], durable["reason"]) == (number, str(leaving.path), "SIGTERM")

    second = Job(tmp_path, seed=99)
    assert_same(second.run(), expected)
    assert second.guard.resumed_from_step == number and second.guard.resumed_path == leaving.path
    assert first.steps + second.steps == list(range(1, 3 * STEPS_PER_EPOCH + 1))
    assert second.guard.run_id == first.guard.run_id


def test_other_signals_have_their_exit_codes(tmp_path: Path) -> None:
    leaving = stopped(Job(tmp_path), middle=stop_at(2, signal.SIGUSR1))
    assert (leaving.code, leaving.step) == (138, 2)


def test_an_accumulation_window_is_never_cut(tmp_path: Path) -> None:
    expected = weights_of_uninterrupted(tmp_path, accumulate=3)
    first = Job(tmp_path, accumulate=3)
    leaving = stopped(first, middle=stop_at(7))
    assert leaving.step == 9 and first.steps[-1] == 9
    assert_same(Job(tmp_path, seed=99, accumulate=3).run(), expected)


def test_a_program_that_swallows_the_exit_is_told_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    told: list[object] = []
    step_end = job.guard.step_end

    def swallow(**scalars: Any) -> None:
        try:
            step_end(**scalars)
        except SystemExit as error:
            told.append(error.code)
            if len(told) == 3:
                raise

    job.guard.step_end = swallow  # type: ignore[method-assign]
    assert stopped(job, middle=lambda job, step: stop_and_wait(job) if not told else None).step == 1
    assert told == [143] * 3
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


# --- other ways to end ---


def test_the_flag_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "graceful_exit.json"

    def set_flag(job: Job, step: int) -> None:
        if step == 3:
            flag.write_text('{"GracefulExit": 1}')
            while job.guard.stopper.agreed_step is None:
                threading.Event().wait(0.01)

    leaving = stopped(Job(tmp_path, flag_file=flag), middle=set_flag)
    assert (leaving.code, leaving.step) == (75, 3) and str(flag) in leaving.reason
    monkeypatch.setenv("MS_ENABLE_GRACEFUL_EXIT", "0")
    monkeypatch.setenv("MINDX_FLAG_POLL_S", "0.02")
    Job(tmp_path, flag_file=flag).run(middle=lambda job, step: flag.write_text('{"GracefulExit": 1}'))


def flag_in(directory: Path) -> Path:
    """One that is set."""
    flag = directory / "graceful_exit.json"
    flag.write_text('{"GracefulExit": 1}')
    return flag


def flags_of(path: Path | None) -> int:
    assert path is not None
    return len(read_header(path).info.flags)


def test_a_flag_that_was_set_before_the_first_start_stops_at_the_first_boundary(tmp_path: Path) -> None:
    """Once: the same command then trains on with the same file, until somebody writes it again."""
    expected = weights_of_uninterrupted(tmp_path)
    flag = flag_in(tmp_path)
    leaving = stopped(Job(tmp_path, flag_file=flag))
    assert (leaving.code, leaving.step, flags_of(leaving.path)) == (75, 1, 1)

    def set_again(job: Job, step: int) -> None:
        if step == 4:
            stop_and_wait(job)

    leaving = stopped(Job(tmp_path, seed=1, flag_file=flag), middle=set_again)
    assert (leaving.code, leaving.step, flags_of(leaving.path)) == (143, 4, 1), "SIGTERM; the flag is done and stays so"
    flag.write_text('{"GracefulExit": 1}')
    leaving = stopped(Job(tmp_path, seed=2, flag_file=flag))
    assert (leaving.code, leaving.step, flags_of(leaving.path)) == (75, 5, 2)
    again = Job(tmp_path, seed=99, flag_file=flag)
    assert_same(again.run(), expected)
    assert again.guard.resumed_from_step == 5


def test_a_flag_waits_for_a_boundary_also_in_a_first_evaluation(tmp_path: Path) -> None:
    """Between two steps a stop would leave at step 0, with nothing saved, at every start."""
    flag = flag_in(tmp_path)

    def evaluate(job: Job) -> None:
        with job.guard.outside_step():
            job.guard.poll()

    assert stopped(Job(tmp_path, flag_file=flag), begin=evaluate).step == 1


def test_a_stop_for_another_reason_answers_the_flag_too(tmp_path: Path) -> None:
    """The platform sets the flag and sends SIGTERM: one stop, not two."""
    flag = tmp_path / "graceful_exit.json"

    def both(job: Job, step: int) -> None:
        if step == 3:
            stop_and_wait(job)
            flag.write_text('{"GracefulExit": 1}')
            while not job.guard.stopper.saver.flags.waiting:
                threading.Event().wait(0.01)

    leaving = stopped(Job(tmp_path, flag_file=flag), middle=both)
    assert (leaving.code, leaving.step, flags_of(leaving.path)) == (143, 3, 1)
    assert Job(tmp_path, flag_file=flag).run()


def test_a_stop_whose_save_failed_has_not_answered_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "graceful_exit.json"
    leaving = stopped(Job(tmp_path), middle=stop_at(2))
    flag.write_text('{"GracefulExit": 1}')
    with monkeypatch.context() as patch:
        patch.setattr(saving_module, "write_checkpoint", lambda *a, **k: (_ for _ in ()).throw(SaveError("injected")))
        leaving = stopped(Job(tmp_path, flag_file=flag))
        assert (leaving.code, leaving.step, leaving.path) == (75, None, None)
    leaving = stopped(Job(tmp_path, flag_file=flag))
    assert (leaving.code, leaving.step) == (75, 3), "asked once more, and saved"
    assert Job(tmp_path, flag_file=flag).run()


def test_a_flag_set_while_nothing_was_trained_since_the_resume_is_noted_in_a_new_file(tmp_path: Path) -> None:
    flag = tmp_path / "graceful_exit.json"
    expected = weights_of_uninterrupted(tmp_path)
    first = stopped(Job(tmp_path), middle=stop_at(STEPS_PER_EPOCH))

    def set_flag(job: Job) -> None:
        with job.guard.outside_step():
            flag.write_text('{"GracefulExit": 1}')
            while job.guard.stopper.agreed_step is None:
                threading.Event().wait(0.01)

    leaving = stopped(Job(tmp_path, flag_file=flag), begin=set_flag)
    assert (leaving.step, flags_of(leaving.path)) == (first.step, 1), "the old file does not know the flag"
    assert_same(Job(tmp_path, seed=99, flag_file=flag).run(), expected)


def test_an_exception_saves_the_last_boundary_and_is_raised(tmp_path: Path) -> None:
    expected = weights_of_uninterrupted(tmp_path)
    with pytest.raises(ValueError, match="injected"):
        Job(tmp_path).run(middle=fail_at(7))
    (path,) = tmp_path.glob("*.safetensors")
    info = read_header(path).info
    assert (info.step, info.reason, info.resumable) == (6, "exception: ValueError: injected", True)
    assert_same(Job(tmp_path, seed=99).run(), expected)
    with pytest.raises(ValueError, match="injected"):
        Job(tmp_path / "not wanted", save_on_exception=False).run(middle=fail_at(7))
    assert not list((tmp_path / "not wanted").glob("*.safetensors"))


def test_an_exception_on_the_way_to_the_stop_is_still_a_graceful_stop(tmp_path: Path) -> None:
    """A peer left first, a loader worker was killed: the job was told to stop, and it says so."""

    def stop_and_break(job: Job, step: int) -> None:
        if step == 5:
            stop_and_wait(job)
            raise ConnectionError("peer is gone")

    leaving = stopped(Job(tmp_path), middle=stop_and_break)
    assert (leaving.code, leaving.step) == (143, 4)
    assert isinstance(leaving.__cause__, ConnectionError)


# --- saving by hand ---


def test_save_writes_the_boundary(tmp_path: Path) -> None:
    paths: list[Path] = []

    def save(job: Job, step: int) -> None:
        if step in (3, 6):
            paths.append(job.guard.save("milestone", None if step == 3 else tmp_path / "kept" / "mine.safetensors"))

    expected = Job(tmp_path / "a").run(after=save)
    assert [p.name for p in paths] == ["job-1_3.safetensors", "mine.safetensors"]
    assert [read_header(p).info.reason for p in paths] == ["milestone"] * 2
    second = Job(tmp_path / "b", seed=99, resume=paths[1])
    assert_same(second.run(), expected)
    assert second.guard.resumed_from_step == 6


def test_save_inside_an_update_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    refused: list[str] = []
    step_end = job.guard.step_end

    def save(*args: Any, **scalars: Any) -> None:
        with pytest.raises(UsageError, match=r"right after guard\.step_end") as caught:
            job.guard.save()
        refused.append(str(caught.value))

    def save_before_the_boundary(**scalars: Any) -> None:
        save()
        step_end(**scalars)

    job.optimizer.register_step_post_hook(save)  # runs before the gate's global one: still updating
    job.guard.step_end = save_before_the_boundary  # type: ignore[method-assign]
    job.run(epochs=1)
    assert "in progress" in refused[0] and "had stepped" in refused[1]
