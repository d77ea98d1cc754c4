"""A `while` over the number of steps around epochs, with the guard's count."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Noisy(), batch_size=7, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
max_steps = 13
with guard:
    while guard.step < max_steps:
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
            if guard.step >= max_steps:
                break
done(model)
