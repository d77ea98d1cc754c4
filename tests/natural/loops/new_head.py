"""Gets a new last layer at the head of epoch 2, and the optimizer its parameters."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])

with guard:
    for epoch in guard.epochs(3):
        if epoch == 2:
            model[4] = nn.Linear(16, 3)
            opt.param_groups[0]["params"] = list(model.parameters())
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
