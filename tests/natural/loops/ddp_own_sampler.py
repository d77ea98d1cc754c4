"""Data parallel with a sampler of the program's own, which draws each rank's part from a generator of the rank's."""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points


class Drawn(Sampler):
    def __init__(self, size, rank):
        self.size, self.epoch = size, 0
        self.generator = torch.Generator().manual_seed(rank)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        weights = torch.ones(self.size) + (torch.arange(self.size) % (1 + self.epoch))
        return iter(torch.multinomial(weights, len(self), generator=self.generator).tolist())

    def __len__(self):
        return self.size // 2


torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")

network = mlp()
model = DistributedDataParallel(network)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = points()
sampler = Drawn(len(data), dist.get_rank())
loader = DataLoader(data, batch_size=3, sampler=sampler)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])


def train():
    for epoch in guard.epochs(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()


guard.run(train)
done(network)

dist.destroy_process_group()
