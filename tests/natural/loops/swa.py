"""Weights averaged over the last epochs, batch norm statistics made after the training."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

swa = torch.optim.swa_utils.AveragedModel(model)
sched = torch.optim.swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=2)
guard = mx.Guard(
    model=model, optimizer=opt, lr_scheduler=sched, loader=loader, stateful={"swa": swa}, directory=sys.argv[1]
)
with guard:
    for epoch in guard.epochs(4):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
        if epoch >= 2:
            swa.update_parameters(model)
            sched.step()
torch.optim.swa_utils.update_bn(DataLoader(points(), batch_size=10), swa)
done(model, swa)
