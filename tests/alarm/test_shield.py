"""Loader workers outlive the signals that end a job, and still do not live for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from mindx_elastic.alarm.exit_codes import STOP_SIGNALS
from mindx_elastic.alarm.shield import WorkerShield

WORKER = """
import sys
from mindx_elastic.alarm.shield import WorkerShield

WorkerShield(grace_s=0.1)(3)
print("ready", flush=True)
for line in sys.stdin:
    print("batch", line.strip(), flush=True)
"""


def test_a_signalled_worker_is_gone_after_the_grace_period() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        worker.send_signal(signal.SIGTERM)
        print("last", file=worker.stdin, flush=True)
        assert worker.stdout.readline() == "batch last\n"
        assert worker.wait(30) == -signal.SIGALRM


class Pids(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return os.getpid(), int(os.environ["OF_THE_USER"])


def user_init(worker_id: int) -> None:
    os.environ["OF_THE_USER"] = f"7{worker_id}"


def test_a_real_loader_worker_survives_every_signal_that_ends_a_job() -> None:
    """Torch's own loop installs a handler of SIGTERM. The user's own function runs as well."""
    batches = iter(DataLoader(Pids(), num_workers=1, prefetch_factor=1, worker_init_fn=WorkerShield(user_init)))
    pid = int(next(batches)[0])
    for number in STOP_SIGNALS:
        os.kill(pid, number)
    rest = [torch.cat(column).tolist() for column in zip(*batches, strict=True)]
    assert rest == [[pid] * 3, [70] * 3]
