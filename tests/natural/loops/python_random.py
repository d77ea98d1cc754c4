"""A `random.Random` of its own chooses the dropout of each step; it is named."""

import random
import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

draw = random.Random(5)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    stateful={"draw": draw},
    loader=loader,
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            model[3].p = draw.choice([0.0, 0.1, 0.3])
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
