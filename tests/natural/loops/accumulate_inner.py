"""Two batches inside each step; the guard sees one boundary for both."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=3, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        batches = iter(loader)
        for pair in zip(batches, batches, strict=True):
            opt.zero_grad()
            for x, y in pair:
                (F.cross_entropy(model(x), y) / 2).backward()
            opt.step()
            guard.step_end()
done(model)
