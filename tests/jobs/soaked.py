"""A short step, many times, with a periodic save at every few of them: ``soaked.py DIR --go FOLDER --marks STEP...``.

Prints ``READY rank pid``, and ``MARK rank step`` at each mark before it waits for a file of that name in the folder (so
that whoever measures looks at a job that stands still); in the end ``DONE rank step``.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import mindx_elastic as mx
from mindx_elastic.train import Callback, CheckpointConfig, Model, ModelCheckpoint, RunContext


class Marks(Callback):
    """Stands still at some steps until it is told to go on."""

    def __init__(self, marks: list[int], go: Path, rank: int) -> None:
        self.marks, self.go, self.rank = marks, go, rank

    def on_train_step_end(self, run_context: RunContext) -> None:
        step = run_context.original_args().cur_step_num
        if step in self.marks:
            os.write(1, f"MARK {self.rank} {step}\n".encode())
            while not (self.go / str(step)).exists():
                time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--marks", type=int, nargs="+", required=True)
    parser.add_argument("--go", type=Path, required=True)
    parser.add_argument("--every", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    os.write(1, f"READY {rank} {os.getpid()}\n".encode())
    network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4000, 4, generator=generator), torch.randint(2, (4000,), generator=generator))
    loader = mx.data.ResumableLoader(data, batch_size=4, shuffle=True, seed=0)
    model = Model(network, nn.CrossEntropyLoss(), optimizer)
    config = CheckpointConfig(save_checkpoint_steps=args.every, keep_checkpoint_max=3, async_save=True)
    epochs = -(-args.marks[-1] // len(loader))
    model.train(
        epochs,
        loader,
        [
            ModelCheckpoint(prefix="soak", directory=args.directory, config=config),
            Marks(args.marks, args.go, rank),
        ],
    )
    os.write(1, f"DONE {rank} {model.position.step}\n".encode())


if __name__ == "__main__":
    main()
