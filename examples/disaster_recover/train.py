"""Trains a small network on scikit-learn's digits in a dynamic cluster. The same program for the scheduler and workers.

Start all of it:        bash run.sh
Start what has died:    bash recover.sh

Each worker saves to ``./ckpt_of_rank/<rank>``. Its last line is JSON with a hash of the weights: the same on all ranks,
and the same as that of a run in which nothing was killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from mindx_elastic import cluster
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import MindxError
from mindx_elastic.train import (
    Callback,
    CheckpointConfig,
    ExceptionCheckpoint,
    LossMonitor,
    Model,
    ModelCheckpoint,
    OnRequestExit,
    RunContext,
)

PREFIX = "train"


class SlowStep(Callback):
    """Makes a step take longer, so that there is time to kill a process."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_step_end(self, run_context: RunContext) -> None:
        time.sleep(self.seconds)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per batch and rank")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds added to each step")
    return parser.parse_args()


def weights_sha256(network: nn.Module) -> str:
    """Of the parameters, which are the same on all ranks; the statistics of batch norm are each rank's own."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.named_parameters()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(args: argparse.Namespace) -> None:
    rank, size = cluster.get_rank(), cluster.get_group_size()
    print(f"rank {rank} of {size}: pid {os.getpid()}", flush=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    pictures = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    loader = ResumableLoader(pictures, args.batch_size, shuffle=True, seed=0)
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    model = Model(network, nn.CrossEntropyLoss(), optimizer, metrics={"accuracy"})

    directory = "./ckpt_of_rank/" + str(rank)
    config = CheckpointConfig(save_checkpoint_steps=20, keep_checkpoint_max=2)
    callbacks: list[Callback] = [
        ExceptionCheckpoint(prefix=PREFIX, directory=directory, config=config),
        OnRequestExit(save_mindir=False, file_name=PREFIX, directory=directory),
        ModelCheckpoint(prefix=PREFIX, directory=directory, config=config),
        LossMonitor(5),
        SlowStep(args.step_s),
    ]
    model.train(args.epochs, loader, callbacks)
    accuracy = float(model.eval(ResumableLoader(pictures, 256))["accuracy"])
    report: dict[str, object] = {"event": "train_end", "rank": rank, "step": model.position.step}
    report |= {"resumed_from_step": model.resumed_from_step, "accuracy": round(accuracy, 4)}
    print(json.dumps(report | {"weights_sha256": weights_sha256(model.bare_network)}), flush=True)


def main() -> int:
    args = parse_args()
    try:
        cluster.init()  # the scheduler serves here until the job is over, and goes no further
        train(args)
    except MindxError as error:  # wrong input: the message says it all, a traceback would bury it
        print(f"train.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
