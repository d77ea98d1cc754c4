"""Epochs of a number of steps on data that are drawn, and a loss that is printed behind each."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
true = torch.randn(8, 3)
model = mlp()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
guard = mx.Guard(model=model, optimizer=opt, directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(4):
        for _step in guard.steps(4):
            x = torch.randn(16, 8)
            loss = F.cross_entropy(model(x), (x @ true).argmax(1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            guard.step_end(loss=loss)
        print("epoch", epoch, "loss", loss.item())
done(model)
