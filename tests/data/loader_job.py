"""Whole processes for test_workers.py: ``loader_job.py START_METHOD CASE...``. Each leads a session of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing import active_children
from typing import Any

import torch

from mindx_elastic.data import ResumableLoader, from_loader
from tests.data.datasets import Noisy, NoisyStream, same

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
KEPT: list[Any] = []
"""Iterators that are alive at the exit."""


class Stuck(Noisy):
    """Never gives back sample 5, whatever signal comes."""

    def __getitem__(self, index: int) -> torch.Tensor:
        while index == 5:
            time.sleep(3600)
        return super().__getitem__(index)


def signal_the_group() -> None:
    for number in SIGNALS:
        os.killpg(0, number)


def shielded(method: str) -> None:
    """Signals to everybody, at once after the start and between batches; the epoch must come to its end."""
    heard: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda signum, frame: heard.append(signum))
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}
    iterator = iter(ResumableLoader(Noisy(24), 4, **options))
    signal_the_group()
    batches = []
    for batch in iterator:
        batches.append(batch)
        signal_the_group()
    in_process = list(ResumableLoader(Noisy(24), 4))
    print("batches", len(batches), "same", same(batches, in_process), "heard", len(heard) == 7 * len(SIGNALS))
    if method == "fork":
        wrapped = from_loader(torch.utils.data.DataLoader(NoisyStream(24), 4, num_workers=2))
        count = 0
        for _ in wrapped:
            count += 1
            signal_the_group()
        print("wrapped", count)


def stuck(method: str) -> None:
    """Exit with a live iterator whose worker is stuck and has deferred a SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loader = ResumableLoader(Stuck(24), 1, num_workers=2, multiprocessing_context=method)
    keep = iter(loader)
    print("first", int(next(keep)[0, 0]))
    print("pids", *(process.pid for process in active_children()), flush=True)
    os.killpg(0, signal.SIGTERM)
    KEPT.append(keep)
    sys.exit(3)


def quiet(method: str) -> None:
    """Everything ordinary, under ``-W error``, and an exit with live iterators."""
    cases: list[dict[str, Any]] = [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "pin_memory": True},
    ]
    for options in cases:
        loader = ResumableLoader(Noisy(24), 4, True, **options)
        list(loader)
        for _ in loader:
            break
        loader.load_state_dict(loader.state_dict())
        print("rest", len(list(loader)))
    wrapped = iter(from_loader(torch.utils.data.DataLoader(NoisyStream(8), 2, num_workers=1)))
    next(wrapped)
    KEPT.extend((iter(loader), wrapped))


if __name__ == "__main__":
    method, *cases = sys.argv[1:]
    for case in cases:
        globals()[case](method)
