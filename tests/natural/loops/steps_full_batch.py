"""The whole data at once, L-BFGS with a closure."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, points

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
x, y = points().tensors
guard = mx.Guard(model=model, optimizer=opt, directory=sys.argv[1])


def closure():
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


with guard:
    for _ in guard.steps(8):
        opt.step(closure)
        guard.step_end()
done(model)
