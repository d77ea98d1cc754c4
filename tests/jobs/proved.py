"""Trains a small network, exactly or with one fault that a stop and a resume bring to light.

python proved.py FAULT DIRECTORY
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mindx_elastic as mx

FAULT, DIRECTORY = sys.argv[1:3]
EPOCHS, BATCH = 2, 4


class Noisy(Dataset[Any]):
    """Augments with a generator of its own."""

    def __init__(self, data: torch.Tensor, targets: torch.Tensor) -> None:
        self.data, self.targets = data, targets
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index] + torch.randn(8, generator=self.generator), self.targets[index]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    random.seed(0)
    x, y = torch.randn(48, 8), torch.randint(0, 3, (48,))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 3))
    head = nn.Linear(3, 3)
    parameters = [*model.parameters(), *(head.parameters() if FAULT == "loose" else ())]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    data: Dataset[Any] = Noisy(x, y) if FAULT == "generator" else TensorDataset(x, y)
    named: Any = mx.data.ResumableLoader(data, batch_size=BATCH, shuffle=True, seed=3)
    if FAULT == "hashes":
        names = {f"sample {index}" for index in range(48)}
        order = [int(name.split()[1]) for name in names]
        named = mx.data.ResumableLoader(TensorDataset(x[order], y[order]), batch_size=BATCH)
    used = DataLoader(data, batch_size=BATCH) if FAULT == "order" else named
    guard = mx.Guard(
        model=model,
        optimizer=optimizer,
        lr_scheduler=None if FAULT == "scheduler" else scheduler,
        loader=None if FAULT == "order" else named,
        directory=DIRECTORY,
        resume="never" if FAULT == "never" else "auto",
    )
    if FAULT == "chance":
        with torch.no_grad():
            model[0].bias.add_(random.SystemRandom().random())
    if FAULT == "crash":
        raise RuntimeError("the disk with the data is not there")

    def step(batch: Any) -> None:
        inputs, targets = batch
        if FAULT == "freeze" and guard.position.step == 3:
            model[3].eval()
        logits = model(inputs)
        loss = F.cross_entropy(head(logits) if FAULT == "loose" else logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if FAULT == "late_chance" and guard.position.step == 4:
            with torch.no_grad():
                model[4].weight.add_(random.SystemRandom().random())
        guard.step_end(loss=loss)
        if FAULT == "draw":
            torch.rand(2)
        if FAULT == "clip":
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)

    with guard:
        if FAULT == "counter":
            for _ in range(EPOCHS):
                for batch in named:
                    step(batch)
        elif FAULT == "prefetch":
            for _ in guard.epochs(EPOCHS):
                batches = iter(used)
                ahead = next(batches, None)
                while ahead is not None:
                    batch, ahead = ahead, next(batches, None)
                    step(batch)
        else:
            for _ in guard.epochs(EPOCHS):
                for batch in used:
                    step(batch)
    print("DONE")


if __name__ == "__main__":
    main()
