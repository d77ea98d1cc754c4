"""StepLR, stepped after the inner loop."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    lr_scheduler=sched,
    loader=loader,
    directory=sys.argv[1],
)

with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
        sched.step()
done(model, opt.param_groups[0]["lr"])
