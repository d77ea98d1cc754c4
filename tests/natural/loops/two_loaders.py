"""Labelled and unlabelled data from two loaders side by side."""

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
labelled = DataLoader(Noisy(), batch_size=6, shuffle=True)
unlabelled = DataLoader(points(60, seed=2), batch_size=12, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=[labelled, unlabelled], directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for (x, y), (u, _) in zip(labelled, unlabelled, strict=True):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss = loss + 0.1 * (model(u).softmax(1) * model(u).log_softmax(1)).sum(1).mean()
            loss.backward()
            opt.step()
            guard.step_end()
done(model)
