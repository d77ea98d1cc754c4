"""AutoClip: gradients are clipped to a percentile of all norms so far."""

import sys

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class AutoClip:
    def __init__(self, percentile):
        self.norms = []
        self.percentile = percentile

    def __call__(self, model):
        total = sum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None)
        self.norms.append(total**0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), np.percentile(self.norms, self.percentile))


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Noisy(), batch_size=6, shuffle=True)
clip = AutoClip(30)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    loader=loader,
    stateful={"clip": clip},
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip(model)
            opt.step()
            guard.step_end()
done(model)
