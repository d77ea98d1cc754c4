"""DDP inside another module, as trainers keep it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = DistributedDataParallel(mlp())

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

network = Task()
opt = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=3, shuffle=True)
guard = mx.Guard(model=network, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            network(x, y).backward()
            opt.step()
            guard.step_end()
done(network)

dist.destroy_process_group()
