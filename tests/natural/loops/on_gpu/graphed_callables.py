"""A network whose forward and backward are CUDA graphs, with fp16 and a gradient scaler outside of them."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, gpu, mlp

device = gpu()
network = mlp().to(device)
opt = torch.optim.Adam(network.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=5)
model = torch.cuda.make_graphed_callables(network, (torch.randn(6, 8, device=device),))
loader = DataLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=network, optimizer=opt, scaler=scaler, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(4):
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            guard.step_end(loss=loss)
done(network, scaler.get_scale())
