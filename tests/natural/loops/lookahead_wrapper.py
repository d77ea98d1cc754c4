"""Lookahead that is not an optimizer of torch's: its state has that of the optimizer inside."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Lookahead:
    def __init__(self, base, every=3, alpha=0.5):
        self.base, self.every, self.alpha, self.count = base, every, alpha, 0
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    def zero_grad(self):
        self.base.zero_grad()

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.count += 1
        if self.count % self.every == 0:
            for p, slow in zip(model.parameters(), self.slow, strict=True):
                slow.lerp_(p, self.alpha)
                p.copy_(slow)

    def state_dict(self):
        return {"count": self.count, "slow": self.slow, "base": self.base.state_dict()}

    def load_state_dict(self, state):
        self.count, self.slow = state["count"], state["slow"]
        self.base.load_state_dict(state["base"])


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = Lookahead(torch.optim.Adam(model.parameters(), lr=1e-2))
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
done(model)
