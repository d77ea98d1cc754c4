"""A small transformer on a text of numbers, for the long drill of faults: any number of ranks, or alone.

Everything that a step may change is there: dropout, gradients gathered over two batches, AdamW, a warm-up with a
cosine, averaged weights, samples with noise from all global streams, loader workers (`--num-workers`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mindx_elastic as mx

SYMBOLS, WIDTH, LENGTH = 11, 16, 12


class Words(torch.utils.data.Dataset[Any]):
    """Pieces of a text; some symbols are replaced at random."""

    def __init__(self, size: int) -> None:
        numbers = torch.arange(size + LENGTH + 1)
        self.text, self.size = (numbers * numbers // 7 + numbers) % SYMBOLS, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.text[index : index + LENGTH].clone()
        x[int(torch.randint(LENGTH, ()))] = random.randrange(SYMBOLS)
        x[np.random.randint(LENGTH)] = 0
        return x, self.text[index + 1 : index + LENGTH + 1]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.body(self.symbols(x) + self.places.weight, mask=mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=160, help="samples of all ranks")
    parser.add_argument("--num-workers", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = Transformer()
    model: nn.Module = network
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(network)
        torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.98**step)
    averaged = torch.optim.swa_utils.AveragedModel(network)
    loader = mx.data.ResumableLoader(
        Words(args.size), batch_size=2, shuffle=True, drop_last=True, num_workers=args.num_workers
    )
    guard = mx.Guard(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        stateful={"averaged": averaged},
        loader=loader,
        directory=args.directory,
        prefix="words",
    )

    def train() -> None:
        for _epoch in guard.epochs(args.epochs):
            for number, (x, y) in guard.enumerate(loader, start=1):
                loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
                loss.backward()
                if number % 2 == 0:
                    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    averaged.update_parameters(network)
                guard.step_end(loss=loss)
            optimizer.zero_grad()

    guard.run(train)
    digest = hashlib.sha256()
    for _, value in sorted(averaged.state_dict().items()):
        digest.update(value.detach().contiguous().numpy().tobytes())
    os.write(1, f"DONE {digest.hexdigest()}\n".encode())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
