"""Two epochs on easy data, then two on all of it."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
easy = mx.data.ResumableLoader(Noisy(18), batch_size=6, shuffle=True, seed=1)
full = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True, seed=2)
guard = mx.Guard(model=model, optimizer=opt, loader=[easy, full], directory=sys.argv[1])


def train(loader, epochs):
    for _epoch in epochs:
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()


with guard:
    train(easy, guard.epochs(2))
    train(full, guard.epochs(4))
done(model)
