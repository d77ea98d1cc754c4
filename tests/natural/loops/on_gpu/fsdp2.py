"""FSDP2 over NCCL, parameters gathered in bf16, clipped gradients."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, gpu

device = gpu()
dist.init_process_group("nccl", device_id=device)
layers = [nn.Sequential(nn.Linear(8 if i == 0 else 16, 16), nn.ReLU(), nn.Dropout(0.1)) for i in range(3)]
model = nn.Sequential(*layers, nn.Linear(16, 3)).to(device)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = mx.data.ResumableLoader(Noisy(36), batch_size=3, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x.to(device)).float(), y.to(device)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            guard.step_end()
done(model)

dist.destroy_process_group()
