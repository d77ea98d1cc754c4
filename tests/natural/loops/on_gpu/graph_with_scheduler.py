"""A graph of forward, backward and Adam; the learning rate is a tensor that a scheduler changes. Captured in the loop,
after some steps without it."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import done, gpu, mlp, points

device = gpu()
model = mlp().to(device)
opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, device=device), capturable=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)
loader = DataLoader(points(), batch_size=6, shuffle=True)
x, y = torch.zeros(6, 8, device=device), torch.zeros(6, dtype=torch.long, device=device)
graph = None


def train():
    opt.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), y).backward()
    opt.step()


guard = mx.Guard(model=model, optimizer=opt, lr_scheduler=scheduler, loader=loader, directory=sys.argv[1])
with guard:
    steps = 0
    for _epoch in guard.epochs(4):
        for a, b in loader:
            x.copy_(a)
            y.copy_(b)
            if graph is not None:
                graph.replay()
            elif steps < 3:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    train()
                torch.cuda.current_stream().wait_stream(side)
                steps += 1
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    train()
                graph.replay()
            scheduler.step()
            guard.step_end()
done(model, *[state["exp_avg_sq"] for state in opt.state.values()])
