"""Counts steps, not epochs, and begins the loader again when it is at its end."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = mx.data.ResumableLoader(Noisy(), batch_size=7, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    batches = iter(loader)
    for _step in guard.steps(13):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        guard.step_end()
done(model)
