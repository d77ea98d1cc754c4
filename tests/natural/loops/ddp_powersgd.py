"""Compressed gradients: the communication hook has state, which is named."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

network = mlp()
model = DistributedDataParallel(network)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

powersgd = default_hooks.PowerSGDState(
    None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
)
model.register_comm_hook(powersgd, default_hooks.powerSGD_hook)
loader = mx.data.ResumableLoader(Noisy(), batch_size=3, shuffle=True)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    stateful={"powersgd": powersgd},
    loader=loader,
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(network)

dist.destroy_process_group()
