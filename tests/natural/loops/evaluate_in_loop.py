"""Evaluates every four steps, with a loader that shuffles, in `outside_step`."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

held_out = DataLoader(Noisy(20), batch_size=5, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])


def evaluate():
    model.eval()
    with torch.no_grad():
        loss = sum(F.cross_entropy(model(x), y) for x, y in held_out)
    model.train()
    return loss


with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
            if guard.step % 4 == 0:
                with guard.outside_step():
                    loss = evaluate()
done(model)
