"""Evaluates in mid-epoch with a loader of its own, not in `outside_step`."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

held_out = DataLoader(points(20, seed=5), batch_size=5, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
            if guard.step % 4 == 0:
                model.eval()
                with torch.no_grad():
                    loss = sum(F.cross_entropy(model(a), b) for a, b in held_out)
                model.train()
done(model)
