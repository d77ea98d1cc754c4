"""What a batch of small samples costs on the training thread, from a `ResumableLoader` and from torch's DataLoader.

    python benchmarks/bench_loader.py [--batches 1,16,64] [--rounds 9]

Neither has workers. The figures are microseconds of thread time a batch, medians over rounds in which the loaders
alternate. Data sets: one that draws nothing, one that draws for each sample, and torch's TensorDataset.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

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


def per_batch_us(loader: Iterable[Any], batches: int) -> float:
    iterator = iter(loader)
    for _ in range(_WARM_UP):
        next(iterator)
    began = time.thread_time_ns()
    for _ in range(batches):
        next(iterator)
    return (time.thread_time_ns() - began) / batches / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}; microseconds a batch")
    plain = Plain()
    datasets: dict[str, Dataset[Any]] = {
        "draws nothing": plain,
        "draws": Noisy(),
        "TensorDataset": TensorDataset(plain.x, plain.y),
    }
    for name, dataset in datasets.items():
        for size in map(int, args.batches.split(",")):
            batches = min(_MOST, _SIZE // size - _WARM_UP - 1)
            stock = DataLoader(dataset, size, shuffle=True)
            ours = mx.data.ResumableLoader(dataset, size, shuffle=True, seed=0)
            rounds = [[per_batch_us(loader, batches) for loader in (stock, ours)] for _ in range(args.rounds)]
            one, other = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"{name:14s} {size:4d} stock {one:7.1f}  ResumableLoader {other:7.1f}  ratio {other / one:.2f}")


if __name__ == "__main__":
    main()
