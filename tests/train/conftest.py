"""Each test here starts outside any job, in an empty working directory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MS_ENABLE_GRACEFUL_EXIT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINDX_OVERLAP", "0")  # most tests count what their callbacks have seen
    torch.set_num_threads(1)  # a network this small only loses by more
    monkeypatch.chdir(tmp_path)  # a checkpoint without a directory goes to the working directory
    # After a graceful exit the guard leaves handlers behind, because a process that stops must not be killed by a late
    # signal. Here the process goes on.
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    with torch.random.fork_rng(devices=[]):
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
