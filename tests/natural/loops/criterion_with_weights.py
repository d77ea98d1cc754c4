"""Metric learning: the criterion has weights, which the optimizer also trains."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Cosine(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width))

    def forward(self, features, y):
        return F.cross_entropy(8 * F.linear(F.normalize(features), F.normalize(self.weight)), y)


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp(out=4)
criterion = Cosine(4, 3)
opt = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=[model, criterion], optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            criterion(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model, criterion)
