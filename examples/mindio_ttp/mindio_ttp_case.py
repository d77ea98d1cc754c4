"""MindIO's guide to its last checkpoint (TTP), with this package: data parallel training that survives a killed rank.

Start it:                      bash msrun.sh
Go on after a rank was killed: bash msrun-resume.sh

Each rank's last line is JSON with a hash of the weights: that of a run in which nothing was killed.
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

import mindx_elastic as mx
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import MindxError


class SlowStep(mx.Callback):
    """Makes a step take longer, so that there is time to kill a rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_step_end(self, run_context: mx.RunContext) -> None:
        time.sleep(self.seconds)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--is_recover", type=int, default=0, choices=[1, 0], help="go on from the last checkpoint")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds added to each step")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    digits = load_digits()
    pictures = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    loader = ResumableLoader(pictures, 32, shuffle=True, seed=1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = mx.OptTFTWrapper(torch.optim.SGD(network.parameters(), lr=1e-2))
    model = mx.Model(network, nn.CrossEntropyLoss(), optimizer)
    print(f"rank {model.ranks.rank} of {model.ranks.world_size}: pid {os.getpid()}", flush=True)
    # MindIO's script has epoch, step and file name of the last checkpoint typed in here; a start finds them by itself.
    model.train(
        args.epochs,
        loader,
        callbacks=[
            mx.LossMonitor(5),
            SlowStep(args.step_s),
            mx.TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints/"),
        ],
        resume="auto" if args.is_recover else "never",
    )
    digest = hashlib.sha256()
    for name, tensor in sorted(model.bare_network.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    report: dict[str, object] = {"event": "train_end", "rank": model.ranks.rank, "step": model.position.step}
    report |= {"resumed_from_step": model.resumed_from_step, "weights_sha256": digest.hexdigest()}
    print(json.dumps(report), flush=True)


def main() -> int:
    try:
        train(parse_args())
    except MindxError as error:  # wrong input: the message says it all, a traceback would bury it
        print(f"mindio_ttp_case.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
