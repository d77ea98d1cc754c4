"""Mixup with numpy's global stream, in the loop."""

import sys

import numpy as np
import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
np.random.seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            lam, order = np.random.beta(0.4, 0.4), torch.randperm(len(x))
            out = model(lam * x + (1 - lam) * x[order])
            (lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order])).backward()
            opt.step()
            guard.step_end()
done(model)
