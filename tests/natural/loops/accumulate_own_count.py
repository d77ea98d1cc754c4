"""Gradients of three batches an update, by a count of its own: a stop waits for the last of three."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=4, shuffle=True)
micro = 0
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            (F.cross_entropy(model(x), y) / 3).backward()
            micro += 1
            if micro % 3 == 0:
                opt.step()
                opt.zero_grad()
            guard.step_end()
done(model)
