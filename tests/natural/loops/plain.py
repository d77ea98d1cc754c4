"""A plain loop over a stock loader that shuffles. `verdicts` has what people change in it."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural import tools

torch.manual_seed(0)
torch.set_num_threads(1)
model = tools.mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(tools.Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            guard.step_end()
tools.done(model)
