"""Two tasks in turn, each with its loader, which begins again when it is at its end."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)
body, heads = mlp(out=8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 2)])
model = nn.ModuleList([body, heads])
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loaders = [
    mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True, seed=1),
    mx.data.ResumableLoader(points(20, classes=2, seed=4), batch_size=5, shuffle=True, seed=2),
]
guard = mx.Guard(model=model, optimizer=opt, loader=loaders, directory=sys.argv[1])
with guard:
    batches = [iter(loader) for loader in loaders]
    for step in guard.steps(17):
        task = step % 2
        try:
            x, y = next(batches[task])
        except StopIteration:
            batches[task] = iter(loaders[task])
            x, y = next(batches[task])
        opt.zero_grad()
        F.cross_entropy(heads[task](body(x)), y).backward()
        opt.step()
        guard.step_end()
done(model)
