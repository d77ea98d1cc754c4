"""Data parallel, with a stock loader and DistributedSampler."""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

network = mlp()
model = DistributedDataParallel(network)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

sampler = DistributedSampler(points(), shuffle=True)
loader = DataLoader(points(), batch_size=3, sampler=sampler)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(network)

dist.destroy_process_group()
