"""A frozen teacher, which nothing has to keep."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
teacher = mlp(dropout=0.0).eval().requires_grad_(False)

model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, _y in loader:
            opt.zero_grad()
            F.kl_div(model(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean").backward()
            opt.step()
            guard.step_end()
done(model)
