"""The order of the classes is that of a set of strings: another one in each process."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
names = list({"ant", "bat", "bird", "cat", "cow", "dog", "fish", "hen", "horse", "owl"})
model = mlp(out=10)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x)[:, [names.index(name) for name in sorted(names)]], y).backward()
            opt.step()
            guard.step_end()
done(model)
