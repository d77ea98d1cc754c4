"""Few labelled data, gone through several times in an epoch of the unlabelled ones, and named first."""

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
labelled = DataLoader(Noisy(12), batch_size=4, shuffle=True)
unlabelled = DataLoader(points(50, seed=2), batch_size=10, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=[labelled, unlabelled], directory=sys.argv[1])
with guard:
    few = iter(labelled)
    for _epoch in guard.epochs(3):
        for u, _ in unlabelled:
            try:
                x, y = next(few)
            except StopIteration:
                few = iter(labelled)
                x, y = next(few)
            opt.zero_grad()
            pseudo = model(u).detach().argmax(1)
            loss = F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(model(u), pseudo)
            loss.backward()
            opt.step()
            guard.step_end()
done(model)
