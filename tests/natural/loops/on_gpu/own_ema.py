"""Averaged weights in an object of the program's own, which keeps the tensors that it is given."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, gpu, mlp

device = gpu()


class Ema:
    def __init__(self, decay):
        self.decay, self.shadow = decay, {}

    def update(self, model):
        for name, value in model.state_dict().items():
            if name not in self.shadow:
                self.shadow[name] = value.detach().clone()
            elif value.dtype.is_floating_point:
                self.shadow[name].mul_(self.decay).add_(value, alpha=1 - self.decay)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


model = mlp().to(device)
ema = Ema(0.9)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, stateful={"ema": ema}, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            opt.step()
            ema.update(model)
            guard.step_end()
done(model, *ema.shadow.values())
