"""Generators of its own, of torch, numpy and Python: gradient noise, mixup, dropout. They are named."""

import random
import sys

import numpy as np
import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

noise = torch.Generator().manual_seed(3)
mix = np.random.default_rng(7)
draw = random.Random(5)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    stateful={"noise": noise, "mix": mix, "draw": draw},
    loader=loader,
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            model[3].p = draw.choice([0.0, 0.1, 0.3])
            opt.zero_grad()
            share, order = mix.beta(0.4, 0.4), mix.permutation(len(x))
            out = model(share * x + (1 - share) * x[order])
            (share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])).backward()
            for p in model.parameters():
                p.grad.add_(torch.randn(p.shape, generator=noise), alpha=0.01)
            opt.step()
            guard.step_end()
done(model)
