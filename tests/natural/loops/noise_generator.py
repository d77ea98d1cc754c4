"""Gradient noise from a torch generator of its own, which is named."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

noise = torch.Generator().manual_seed(3)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    stateful={"noise": noise},
    loader=loader,
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.grad.add_(torch.randn(p.shape, generator=noise), alpha=0.01)
            opt.step()
            guard.step_end()
done(model)
