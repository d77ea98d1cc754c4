"""A loop whose own state is all kept. `verdicts` adds some that is not, as programs have it."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points


class Scale:
    """Of the loss; follows the steps."""

    KEPT = ("scale", "calls")

    def __init__(self):
        self.scale, self.calls = 1.0, 0

    def __call__(self, loss):
        self.calls += 1
        self.scale *= 0.99
        return loss * self.scale / (1 + 0.01 * self.calls)

    def state_dict(self):
        return {name: getattr(self, name) for name in self.KEPT}

    def load_state_dict(self, state):
        vars(self).update(state)


class Curved(torch.optim.SGD):
    """Keeps a curvature in its parameters, and what it has won in an attribute of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self._wealth = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        self._wealth = 0.9 * self._wealth + 0.2
        for group in self.param_groups:
            for p in group["params"]:
                p.hess = 0.9 * getattr(p, "hess", 1.0) + p.grad.square()
                p.sub_(p.grad / p.hess.sqrt(), alpha=group["lr"] * self._wealth)


def off(module):
    if isinstance(module, nn.Dropout):
        module.p = 0.0


torch.manual_seed(0)
torch.set_num_threads(1)
model, scale = mlp(), Scale()
opt = Curved(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(points(), batch_size=6, shuffle=True)
guard = mx.Guard(model=model, optimizer=opt, loader=loader, stateful={"scale": scale}, directory=sys.argv[1])
first, n, is_late = None, 0, False
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            loss = scale(F.cross_entropy(model(x), y))
            opt.zero_grad()
            loss.backward()
            opt.step()
            guard.step_end(loss=loss)
done(model)
