"""The whole step in a CUDA graph, captured after some steps to warm up, as torch's notes have it."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import done, gpu, mlp, points

device = gpu()
model = mlp().to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(points(), batch_size=6, shuffle=True)
x, y = torch.randn(6, 8, device=device), torch.zeros(6, dtype=torch.long, device=device)


def train():
    opt.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = train()

guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(4):
        for a, b in loader:
            x.copy_(a)
            y.copy_(b)
            graph.replay()
            guard.step_end(loss=loss)
done(model, *[state["momentum_buffer"] for state in opt.state.values()])
