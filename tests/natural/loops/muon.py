"""An optimizer of the program's own, written like torch's, whose momentum is in a dict by parameter."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.momenta = {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.momenta:
                    self.momenta[p] = {"momentum": torch.zeros_like(p)}
                momentum = self.momenta[p]["momentum"]
                momentum.lerp_(p.grad, 1 - group["momentum"])
                p.sub_(group["lr"] * momentum / (momentum.norm() + 1e-7))


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = Muon(model.parameters())
loader = DataLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
