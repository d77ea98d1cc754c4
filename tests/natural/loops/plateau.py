"""The learning rate falls when the validation loss does not: stepped once an epoch, with an evaluation."""

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

held_out = DataLoader(points(20, seed=5), batch_size=5, shuffle=True)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5, threshold=0.2)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    lr_scheduler=sched,
    loader=loader,
    directory=sys.argv[1],
)

with guard:
    for _epoch in guard.epochs(4):
        model.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(x), y) for x, y in held_out]
        sched.step(torch.stack(losses).mean())
done(model, opt.param_groups[0]["lr"])
