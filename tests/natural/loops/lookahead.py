"""Lookahead around Adam: the slow weights are in the state of the outer optimizer, which shares the inner one's."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, every=3, alpha=0.5):
        self.base, self.every, self.alpha = base, every, alpha
        super().__init__(base.param_groups, {"passed": 0})
        self.param_groups, self.state = base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for group in self.param_groups:
            group["passed"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["passed"] % self.every == 0:
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)


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
