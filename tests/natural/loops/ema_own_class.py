"""An average of the weights in a class of the program's own, with both methods."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Average:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p, 1 - self.decay)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

ema = Average(model)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    stateful={"ema": ema},
    loader=loader,
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            ema.update(model)
            guard.step_end()
done(model, *ema.shadow.values())
