"""A larger part of the data each epoch, through a new loader each time: the guard does not know them."""

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
guard = mx.Guard(model=model, optimizer=opt, directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(3):
        loader = DataLoader(Noisy(12 * epoch), batch_size=6, shuffle=True)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
