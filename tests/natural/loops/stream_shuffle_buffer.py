"""An iterable data set that shuffles through a buffer with Python's global stream."""

import random
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points


class Shuffled(IterableDataset):
    def __init__(self, data, buffer):
        self.data, self.buffer, self.epoch = data, buffer, 0

    def __iter__(self):
        self.epoch += 1
        draw = random.Random(self.epoch)
        held = []
        for sample in self.data:
            if len(held) == self.buffer:
                at = draw.randrange(self.buffer)
                yield held[at]
                held[at] = sample
            else:
                held.append(sample)
        draw.shuffle(held)
        yield from held


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Shuffled(points(), 8), batch_size=5)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
