"""What a batch of small samples costs on the training thread, from a `ResumableLoader` and from torch's DataLoader.

    python benchmarks/bench_loader.py [--batches 1,16,64] [--rounds 9] [--json FILE]

Neither has workers. The figures are microseconds of thread time a batch, medians over rounds in which the loaders
alternate. Data sets: one that draws nothing, those that draw from one stream for each sample, and torch's
TensorDataset.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import harness
import mindx_elastic as mx

_SIZE, _WARM_UP, _MOST = 1 << 13, 20, 100


class Plain(Dataset[Any]):
    """A small tensor and a label."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(_SIZE, 64), torch.randint(0, 10, (_SIZE,))

    def __len__(self) -> int:
        return _SIZE

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Noisy(Plain):
    """With noise on the tensor."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + torch.randn(64), self.y[index]


class Flipped(Plain):
    """Turned around by one number that `draw` gives."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return self.x[index] if self.draw() < 0.5 else -self.x[index], self.y[index]


def per_batch_s(loader: Iterable[Any], batches: int) -> float:
    iterator = iter(loader)
    for _ in range(_WARM_UP):
        next(iterator)
    began = time.thread_time_ns()
    for _ in range(batches):
        next(iterator)
    return (time.thread_time_ns() - began) / batches / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,16,64")
    harness.add_arguments(parser, rounds=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = harness.Report(args)
    plain = Plain()
    datasets: dict[str, Dataset[Any]] = {
        "draws nothing": plain,
        "draws from torch": Noisy(),
        "draws from numpy": Flipped(np.random.random_sample),
        "draws from Python": Flipped(random.random),
        "TensorDataset": TensorDataset(plain.x, plain.y),
    }
    for name, dataset in datasets.items():
        for size in map(int, args.batches.split(",")):
            batches = min(_MOST, _SIZE // size - _WARM_UP - 1)
            stock = DataLoader(dataset, size, shuffle=True)
            ours = mx.data.ResumableLoader(dataset, size, shuffle=True, seed=0)
            methods = {
                "stock": functools.partial(per_batch_s, stock, batches),
                "ours": functools.partial(per_batch_s, ours, batches),
            }
            compared = harness.compare(f"{name}, batches of {size}", methods, rounds=args.rounds)
            target = harness.Target(method="ours", times_as_long=1.3)
            report.add(compared, base="stock", targets=[target], scale=1e6, unit="us")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
