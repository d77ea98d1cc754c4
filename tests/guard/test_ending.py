"""How a block ends: its last boundary is on the disk, once and true; and a process leaves whose device may wait."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindx_elastic.capture import plain_component
from mindx_elastic.errors import GracefulExit, UnmanagedStateError
from mindx_elastic.guard import saver as saving
from mindx_elastic.guard.ending import GuardEnding
from mindx_elastic.persist.catalog import read_entries
from mindx_elastic.persist.format import read_header
from tests.capture.round_trip import assert_same
from tests.guarded import STEPS_PER_EPOCH, Job, stop_and_wait

LAST = 3 * STEPS_PER_EPOCH


pytestmark = pytest.mark.usefixtures("clean")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*.safetensors"))


def test_the_end_is_kept_and_the_same_command_has_nothing_left_to_train(tmp_path: Path) -> None:
    job = Job(tmp_path)
    expected = job.run()
    assert names(tmp_path) == [f"job-3_{STEPS_PER_EPOCH}_final.safetensors"]
    info = read_header(next(tmp_path.glob("*.safetensors"))).info
    assert (info.step, info.kind, info.resumable) == (LAST, "final", True)
    (entry,) = read_entries(tmp_path)
    assert entry.looks_ours
    ended: list[int] = []
    again = Job(tmp_path, seed=99)
    assert_same(again.run(between=lambda job, epoch: ended.append(epoch)), expected)
    assert (again.steps, ended) == ([], []), "the code after the last epoch has run"
    assert names(tmp_path) == [f"job-3_{STEPS_PER_EPOCH}_final.safetensors"], "it is not written twice"


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(tmp_path, final_save=False).run(1)
    monkeypatch.setenv("MINDX_FINAL_SAVE", "0")
    Job(tmp_path).run(1)
    assert names(tmp_path) == []
    Job(tmp_path, final_save=True).run(1)
    assert len(names(tmp_path)) == 1
    Job(tmp_path / "no step", final_save=True).run(0)
    assert names(tmp_path / "no step") == []


@pytest.mark.parametrize("last", [12, 9])
def test_a_memory_that_takes_long_to_copy_is_part_of_the_end(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plain_component, "_LONG_S", 0.0)
    monkeypatch.setattr(plain_component, "_LONG_SHARE", 0.0)
    caplog.set_level(logging.INFO)
    memory: list[int] = []
    job = Job(tmp_path, loader=None, stateful={"memory": memory})
    with job.guard:
        for step in job.guard.steps(12):
            memory.append(step)
            job.optimizer.step()
            job.guard.step_end()
            if step == last:
                break
    assert "memory takes" in caplog.text, "it is not copied at each boundary"
    assert len(names(tmp_path)) == 1
    assert ("memory: saved as now" in caplog.text) == (last == 9), "only where the end was not known"


def test_a_save_by_hand_counts_where_a_start_looks(tmp_path: Path) -> None:
    Job(tmp_path / "a").run(1, between=lambda job, epoch: job.guard.save())
    assert names(tmp_path / "a") == ["job-1_5.safetensors"]
    Job(tmp_path / "b").run(1, between=lambda job, epoch: job.guard.save(path=tmp_path / "elsewhere" / "x.safetensors"))
    assert names(tmp_path / "b") == ["job-1_5_final.safetensors"]


def test_after_sys_exit_0_in_mid_training_the_job_goes_on(tmp_path: Path) -> None:
    expected = Job(tmp_path / "whole").run()
    with pytest.raises(SystemExit):
        Job(tmp_path / "a").run(after=lambda job, step: sys.exit(0) if step == 7 else None)
    assert names(tmp_path / "a") == ["job-2_2_final.safetensors"]
    assert_same(Job(tmp_path / "a", seed=99).run(), expected)


def test_weights_changed_behind_the_last_epoch_belong_to_its_boundary(tmp_path: Path) -> None:
    """An average of weights, copied into the model inside the block: the same command does not do it again."""

    def average(job: Job, epoch: int) -> None:
        if epoch == 3:
            with torch.no_grad():
                for parameter in job.network.parameters():
                    parameter.mul_(0.5)

    expected = Job(tmp_path).run(between=average)
    assert len(names(tmp_path)) == 1
    assert_same(Job(tmp_path, seed=99).run(between=average), expected)


def test_an_alarm_at_the_very_end_leaves_a_breakpoint_and_no_final_file(tmp_path: Path) -> None:
    expected = Job(tmp_path / "whole").run()
    with pytest.raises(GracefulExit):
        Job(tmp_path / "a").run(between=lambda job, epoch: stop_and_wait(job) if epoch == 3 else None)
    assert names(tmp_path / "a") == ["job-3_5_breakpoint.safetensors"]
    again = Job(tmp_path / "a", seed=99)
    assert_same(again.run(), expected)
    assert names(tmp_path / "a") == ["job-3_5_breakpoint.safetensors"], "what was resumed from has the end"


def test_a_signal_during_the_last_save_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stop any more: the file is whole, and the signal meets whoever listened before the guard."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    write = getattr(saving, "write_checkpoint")  # noqa: B009

    def signalled(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return write(*args, **options)

    monkeypatch.setattr(saving, "write_checkpoint", signalled)
    try:
        Job(tmp_path).run(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert names(tmp_path) == ["job-1_5_final.safetensors"]
    assert heard == [signal.SIGUSR1]


class Left(Exception):
    """The process would have ended."""


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", ["peer", "signal"])
def test_a_process_whose_device_may_wait_for_a_dead_rank_ends_at_once(kind: str, on_device: bool) -> None:
    ending = ending_of(SimpleNamespace(kind=kind, deadline=SimpleNamespace(at=0.0)), on_device)
    if kind == "peer" and on_device:
        with pytest.raises(Left, match="may wait for a rank that is gone"):
            ending.leave()
    else:
        assert ending.leave().code == 75


def ending_of(alarm: Any, on_device: bool = False) -> GuardEnding:
    """Of rank 0, after `alarm`."""
    saved: list[str] = []

    def leave_behind(alarm: object, why: str) -> None:
        assert saved == ["callbacks"]
        raise Left(why)

    stopper: Any = SimpleNamespace(
        alarm=alarm,
        ranks=SimpleNamespace(rank=0),
        on_exception=lambda error: None,
        after_save=lambda: saved.append("callbacks"),
        leave_behind=leave_behind,
        exit=lambda: GracefulExit(75, reason="rank 1 is gone", step=3, path=None),
    )
    listeners: Any = SimpleNamespace(handlers=SimpleNamespace(linger=lambda at: None))
    saver: Any = SimpleNamespace(
        collector=SimpleNamespace(devices=SimpleNamespace(is_used=on_device)),
        events=SimpleNamespace(emit=lambda *args, **facts: None),
    )
    around: Any = SimpleNamespace(leave=lambda stopper: None)
    opening: Any = SimpleNamespace(around=around, saver=saver, unmanaged=None, policies=(), periodic=())
    opening.settings, opening.start = SimpleNamespace(final_save=False), SimpleNamespace(step=None)
    loop: Any = None
    return GuardEnding(opening, stopper, listeners, loop, loop, loop)


@pytest.mark.parametrize(
    ("origin", "error", "is_own"),
    [
        (1, RuntimeError("Connection closed by peer"), False),
        (0, RuntimeError("bad batch"), True),
        (1, ValueError("bad batch"), True),
        (1, UnmanagedStateError("bad"), True),
    ],
    ids=["of the collective", "of this rank", "of all ranks", "a refusal"],
)
def test_a_collective_that_another_ranks_exception_breaks_is_no_failure_of_this_one(
    origin: int, error: Exception, is_own: bool
) -> None:
    ending = ending_of(SimpleNamespace(kind="exception", origin=origin, deadline=SimpleNamespace(at=0.0)))
    if is_own:
        ending.fail(3, error)  # which the caller raises
    else:
        with pytest.raises(GracefulExit) as left:
            ending.fail(3, error)
        assert left.value.code == 75
