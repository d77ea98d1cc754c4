"""Loader workers outlive the signals that end a job, and still do not live for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mindx_elastic.alarm.exit_codes import STOP_SIGNALS
from mindx_elastic.alarm.shield import WorkerShield

WORKER = """
import sys
from mindx_elastic.alarm.shield import WorkerShield

WorkerShield(lambda worker_id: print("init", worker_id, flush=True), grace_s=float(sys.argv[1]))(3)
for line in sys.stdin:
    print("batch", line.strip(), flush=True)
"""


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER, str(getattr(request, "param", 30.0))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def test_a_worker_goes_on_after_every_shielded_signal(worker: subprocess.Popen[str]) -> None:
    requests, answers = pipes(worker)
    assert answers.readline() == "init 3\n", "the user's own function runs, after the shield"
    for number in STOP_SIGNALS:
        worker.send_signal(number)
        print(int(number), file=requests, flush=True)
        assert answers.readline() == f"batch {int(number)}\n"


@pytest.mark.parametrize("worker", [0.1], indirect=True)
def test_a_signalled_worker_is_gone_after_the_grace_period(worker: subprocess.Popen[str]) -> None:
    requests, answers = pipes(worker)
    answers.readline()
    worker.send_signal(signal.SIGTERM)
    print("last", file=requests, flush=True)
    assert answers.readline() == "batch last\n"
    assert worker.wait(30) == -signal.SIGALRM


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_a_real_loader_worker_survives_sigterm() -> None:
    loader = DataLoader(Pids(), num_workers=1, prefetch_factor=1, worker_init_fn=WorkerShield())
    batches = iter(loader)
    pid = int(next(batches))
    os.kill(pid, signal.SIGTERM)
    rest = torch.cat(list(batches))
    assert rest.tolist() == [pid] * 3
