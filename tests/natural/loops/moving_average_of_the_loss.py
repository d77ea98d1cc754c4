"""The step size follows a moving average of the loss, a plain number."""

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
average = None
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])

with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
            opt.param_groups[0]["lr"] = 0.05 * average
            opt.zero_grad()
            loss.backward()
            opt.step()
            guard.step_end()
done(model)
