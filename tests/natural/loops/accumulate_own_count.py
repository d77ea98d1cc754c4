"""The same with Python's `enumerate`, which counts from 0 after a resume: the end of the epoch is missed."""

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
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for i, (x, y) in enumerate(loader, start=1):
            (F.cross_entropy(model(x), y) / 3).backward()
            if i % 3 == 0 or i == len(loader):
                opt.step()
                opt.zero_grad()
            guard.step_end()
done(model)
