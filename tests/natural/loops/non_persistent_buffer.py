"""A running mean in a buffer that is not saved with the module."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.net = mlp()

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.net(x - self.mean)


model = Centred()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
