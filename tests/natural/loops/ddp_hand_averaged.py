"""Data parallel with all of the loop in `no_sync`: the gradients are averaged by hand, and each rank keeps batch norm
statistics of its own, because DDP then broadcasts no buffers."""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")

network = mlp()
model = DistributedDataParallel(network)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=2, shuffle=True, drop_last=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])

with guard, model.no_sync():
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for parameter in network.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            opt.step()
            guard.step_end()
done(network)

dist.destroy_process_group()
