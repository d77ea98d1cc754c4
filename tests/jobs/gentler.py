"""Trains a small network, after a resume with half the learning rate: `python gentler.py DIRECTORY`."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mindx_elastic as mx


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 3))
    loader = mx.data.ResumableLoader(data, batch_size=4, shuffle=True, seed=3)
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=sys.argv[1])
    with guard:
        for _ in guard.epochs(2):
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = 0.01 if guard.resumed_from_step is None else 0.005
                loss.backward()
                optimizer.step()
                guard.step_end(loss=loss)


if __name__ == "__main__":
    main()
