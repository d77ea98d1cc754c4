"""A list of batches in place of a loader: it has no position."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = points().tensors
loader = list(zip(x.split(6), y.split(6), strict=True))
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for a, b in loader:
            opt.zero_grad()
            F.cross_entropy(model(a), b).backward()
            opt.step()
            guard.step_end()
done(model)
