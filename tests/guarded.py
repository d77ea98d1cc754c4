"""A whole small job on a `Guard` in this very process, and what must be as before once the guard has been left."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import Dataset

from mindx_elastic import Guard
from mindx_elastic.alarm.exit_codes import STOP_SIGNALS
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import GracefulExit
from tests.harness import wait_until

__all__ = [
    "STEPS_PER_EPOCH",
    "Job",
    "fail_at",
    "no_traces",
    "plain_environment",
    "stop_and_wait",
    "stop_at",
    "stopped",
    "weights_of_uninterrupted",
]

STEPS_PER_EPOCH = 5
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "MS_ENABLE_GRACEFUL_EXIT")


class Points(Dataset[Any]):
    """Noise drawn again for each sample, from every random stream."""

    def __len__(self) -> int:
        return 4 * STEPS_PER_EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(4.0) * index / 10 + torch.randn(4) + random.random() + float(np.random.rand())
        return x, torch.tensor(index % 3)


class Done(list[int]):
    """What this process has done; of another class than list, no checkpoint has it."""


class Job:
    """Everything is built from `seed`; `where` receives (job, coming step) in the middle of every step."""

    def __init__(self, directory: Path, *, seed: int = 0, accumulate: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.accumulate = accumulate
        self.network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=100)
        self.loader = ResumableLoader(Points(), batch_size=4, shuffle=True, seed=3)
        parts: dict[str, Any] = {
            "model": self.network,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "loader": self.loader,
            "directory": directory,
            "prefix": "job",
        }
        self.guard = Guard(**{**parts, **options})
        self.epochs = Done()
        self.steps = Done()

    def run(
        self,
        epochs: int = 3,
        *,
        middle: Callable[[Job, int], object] = lambda job, step: None,
        after: Callable[[Job, int], object] = lambda job, step: None,
        begin: Callable[[Job], object] = lambda job: None,
        between: Callable[[Job, int], object] = lambda job, epoch: None,
    ) -> dict[str, torch.Tensor]:
        """Train to the end. Hooks: in mid-step, after a boundary, before the first batch, after each epoch."""
        with self.guard as guard:
            begin(self)
            for epoch in guard.epochs(epochs):
                self.epochs.append(epoch)
                for x, y in self.loader:
                    step = guard.position.step + 1
                    loss = nn.functional.cross_entropy(self.network(x), y)
                    (loss / self.accumulate).backward()
                    middle(self, step)
                    if step % self.accumulate == 0:
                        self.optimizer.step()
                        self.scheduler.step()
                        self.optimizer.zero_grad()
                    self.steps.append(step)
                    guard.step_end(loss=loss)
                    after(self, step)
                between(self, epoch)
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.network.state_dict().items()}


def stop_at(number: int, signum: int = signal.SIGTERM) -> Any:
    """For `Job.run`: the signal arrives in the middle of step `number`."""
    return lambda job, step: stop_and_wait(job, signum) if step == number else None


def fail_at(number: int) -> Any:
    """For `Job.run`: step `number` raises in its middle."""

    def fail(job: Job, step: int) -> None:
        if step == number:
            raise ValueError("injected")

    return fail


def stopped(job: Job, **options: Any) -> GracefulExit:
    """How the job stops."""
    with pytest.raises(GracefulExit) as caught:
        job.run(**options)
    return caught.value


def weights_of_uninterrupted(directory: Path, epochs: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    run_options = {name: options.pop(name) for name in ("begin", "between") if name in options}
    return Job(directory / "uninterrupted", **options).run(epochs, **run_options)


def stop_and_wait(job: Job, signum: int = signal.SIGTERM) -> None:
    """Signal this process for real and wait until the ranks (this one) have agreed: the coming boundary is the last."""
    os.kill(os.getpid(), signum)
    wait_until(lambda: job.guard.stopper.agreed_step is not None, "the agreement")


def plain_environment(monkeypatch: Any) -> None:
    """Nothing of the environment counts. No overlap: a test in this process counts the steps of its job."""
    for name in list(os.environ):
        if name in _VARIABLES or name.startswith("MINDX_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MINDX_OVERLAP", "0")


@contextmanager
def no_traces() -> Iterator[None]:
    """Handlers, hooks, threads and log handlers are as they were, whatever happened inside."""

    def look() -> dict[str, object]:
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return {
            "signal handlers": {n: signal.getsignal(n) for n in STOP_SIGNALS},
            "wakeup descriptor": fd,
            "optimizer hooks": (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)),
            "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("mindx")),
            "log handlers": list(logging.getLogger("mindx_elastic").handlers),
        }

    before = look()
    threads, fork_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        after = look()
        for number in STOP_SIGNALS:
            signal.signal(number, before["signal handlers"][number])  # type: ignore[index]
        torch.set_num_threads(threads)
        torch.set_rng_state(fork_state)
    # After a graceful stop the handlers linger until the deadline (the process is expected to leave): not a trace.
    lingering = {n: _lingers(h) for n, h in after["signal handlers"].items()}  # type: ignore[attr-defined]
    for number, lingers in lingering.items():
        if lingers:
            after["signal handlers"][number] = before["signal handlers"][number]  # type: ignore[index]
    if after != before:
        raise AssertionError(f"traces are left: {after}\nexpected: {before}")


def _lingers(handler: object) -> bool:
    return getattr(handler, "__name__", "") == "_late"
