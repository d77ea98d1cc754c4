from __future__ import annotations

import os
import signal
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from torch.utils.data import get_worker_info

from mindx_elastic.alarm.exit_codes import STOP_SIGNALS
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import UsageError
from tests.data.datasets import Noisy
from tests.data.loader_job import Stuck
from tests.watchdog import finish

ROOT = Path(__file__).parents[2]
GRACE_S = 3600  # a shielded worker ends by itself after so long, which must not be what ends it here


def run_job(*arguments: str, code: int = 0, fresh: bool = False) -> list[list[str]]:
    """The words of each line that the job printed; it must print nothing on stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MINDX_GRACE_S": str(GRACE_S)}
    script = Path(__file__).with_name("loader_job.py")
    done = finish([sys.executable, "-W", "error", script, *arguments], env=env, fresh=fresh)
    if "multiprocessing/resource_tracker.py" not in done.stderr.partition("line")[0]:  # a name that is gone already
        assert done.stderr == ""
    assert done.returncode == code
    return [line.split() for line in done.stdout.splitlines()]


SHIELDED = ["batches", "6", "same", "True", "heard", "True"]


def test_signals_to_the_whole_group_end_no_epoch_and_nothing_holds_up_the_exit() -> None:
    # The interpreter's own end is part of it: the iterators that are still alive are taken down with their module.
    shielded, wrapped, *rests, first, pids = run_job("fork", "shielded", "quiet", "stuck", code=3, fresh=True)
    assert (shielded, wrapped) == (SHIELDED, ["wrapped", "6"])
    assert rests == [["rest", "5"]] * 3
    assert first == ["first", "0"] and len(pids) > 2
    for pid in pids[1:]:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_signal_does_not_end_a_worker_that_is_still_starting() -> None:
    assert run_job("spawn", "shielded") == [SHIELDED]


def test_shutdown_kills_a_stuck_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_GRACE_S", str(GRACE_S))
    source = ResumableLoader(Stuck(24), 1, num_workers=2)
    iterator = iter(source)
    next(iterator)
    processes = active_children()
    assert len(processes) == 2
    for process in processes:
        os.kill(process.pid or 0, signal.SIGTERM)
    source.shutdown()
    source.shutdown()
    assert [process.is_alive() for process in processes] == [False, False]
    assert source.state_dict()["batch"] == 1
    with pytest.raises(UsageError, match="shut down"):
        next(iterator)


@pytest.mark.parametrize("persistent", [False, True])
def test_shutdown_asks_first(persistent: bool) -> None:
    source = ResumableLoader(Noisy(24), 4, num_workers=2, persistent_workers=persistent)
    iterator = iter(source)
    next(iterator)
    processes = active_children()
    source.shutdown()
    assert [process.exitcode for process in processes] == [0, 0]
    source.set_epoch(1)
    assert len(list(source)) == 6
    source.shutdown()


def test_dropping_the_loader_ends_persistent_workers() -> None:
    source = ResumableLoader(Noisy(24), 4, num_workers=1, persistent_workers=True)
    list(source)
    processes = active_children()
    del source
    assert [process.exitcode for process in processes] == [0]


class Inside(Noisy):
    """What signals look like from inside a worker: (blocked, default action, wakeup fd)."""

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS))
        default = sum(signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN) for number in STOP_SIGNALS)
        return torch.tensor([blocked, default, signal.set_wakeup_fd(-1)])


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # the last one: the default of Python 3.14
def test_signals_inside_and_outside(method: str) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        source = ResumableLoader(Inside(1), num_workers=1, multiprocessing_context=method)
        assert next(iter(source)).tolist() == [[0, 0, -1]]
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS)
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def test_the_grace_period_of_a_worker_can_be_set() -> None:
    source = ResumableLoader(Stuck(6), 1, num_workers=1)
    source.worker_grace_s = 0.1
    iterator = iter(source)
    (process,) = active_children()
    os.kill(process.pid or 0, signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"worker .* is killed by signal: Alarm clock|exited unexpectedly"):
        list(iterator)
    assert not process.is_alive()
