"""Stops when the validation loss has not fallen for two epochs; its counter is kept."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp, points


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def should_stop(self, loss):
        if loss < self.best - 0.12:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.bad > self.patience

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)

held_out = points(20, seed=5).tensors
stopping = EarlyStopping(patience=1)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    stateful={"stopping": stopping},
    loader=loader,
    directory=sys.argv[1],
)

with guard:
    for _epoch in guard.epochs(8):
        model.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            guard.step_end()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(held_out[0]), held_out[1]).item()
        if stopping.should_stop(loss):
            break
done(model, guard.step)
