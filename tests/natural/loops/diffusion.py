"""Random times and noise for each sample, and averaged weights with a warm-up."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import done, points

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
ema = torch.optim.swa_utils.AveragedModel(
    model, avg_fn=lambda average, now, count: average.lerp(now, 1 - min(0.9, float((1 + count) / (10 + count))))
)
loader = DataLoader(points(), batch_size=6, shuffle=True)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    stateful={"ema": ema},
    loader=loader,
    directory=sys.argv[1],
)

with guard:
    for _epoch in guard.epochs(3):
        for x, _ in loader:
            t = torch.rand(len(x), 1)
            noise = torch.randn_like(x)
            noisy = (1 - t).sqrt() * x + t.sqrt() * noise
            opt.zero_grad()
            F.mse_loss(model(torch.cat([noisy, t], 1)), noise).backward()
            opt.step()
            ema.update_parameters(model)
            guard.step_end()
done(model, ema)
