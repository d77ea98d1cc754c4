"""Gradient descent by hand, without an optimizer."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.sub_(g, alpha=0.05)
            guard.step_end()
done(model)
