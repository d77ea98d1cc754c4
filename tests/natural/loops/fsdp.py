"""Fully sharded, with averaged weights."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
ema = torch.optim.swa_utils.AveragedModel(model)
for each in (model, ema.module):
    fully_shard(each)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = mx.data.ResumableLoader(Noisy(), batch_size=3, shuffle=True)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    stateful={"ema": ema},
    loader=loader,
    directory=sys.argv[1],
)

with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            ema.update_parameters(model)
            guard.step_end()
done(model, ema)

dist.destroy_process_group()
