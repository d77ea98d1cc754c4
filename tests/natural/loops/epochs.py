"""Epochs over a resumable loader, a scheduler, dropout and batch norm."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True, seed=0)
guard = mx.Guard(model=model, optimizer=opt, lr_scheduler=sched, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            sched.step()
            guard.step_end(loss=loss)
done(model)
