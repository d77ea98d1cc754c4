"""Fetches one batch ahead, also over the end of an epoch."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Noisy(), batch_size=7, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])


def endless():
    while True:
        yield from loader


with guard:
    batches = endless()
    x, y = next(batches)
    for _step in guard.steps(13):
        loss = F.cross_entropy(model(x), y)
        x, y = next(batches)
        opt.zero_grad()
        loss.backward()
        opt.step()
        guard.step_end()
done(model)
