"""Data parallel that goes over to local SGD in its second epoch: from then on each rank has weights of its own, which
are averaged at each epoch's end."""

import sys
from contextlib import nullcontext

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

with guard:
    for epoch in guard.epochs(3):
        for i, (x, y) in guard.enumerate(loader, start=1):
            opt.zero_grad()
            with nullcontext() if epoch == 1 else model.no_sync():
                F.cross_entropy(model(x), y).backward()
            opt.step()
            if i == len(loader):
                with torch.no_grad():
                    for parameter in network.parameters():
                        dist.all_reduce(parameter)
                        parameter.div_(dist.get_world_size())
            guard.step_end()
done(network)

dist.destroy_process_group()
