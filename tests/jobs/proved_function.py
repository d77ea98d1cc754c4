"""Draws its batches with a function, each one while the step before is still busy."""

from __future__ import annotations

import sys

import torch
from torch import nn

import mindx_elastic as mx

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.from_function(lambda: torch.randn(3, 4))
guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=sys.argv[1])
with guard:
    batches = iter(loader)
    batch = next(batches)
    for _ in guard.steps(8):
        for _ in range(2):
            loss = model(batch).square().mean() / 2
            batch = next(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step_end(loss=loss)
