"""`ReduceLROnPlateau` with the mean loss of the epoch's steps, which a meter has added up."""

import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, count=1):
        self.sum, self.count = self.sum + value * count, self.count + count

    @property
    def average(self):
        return self.sum / max(1, self.count)


torch.manual_seed(0)
torch.set_num_threads(1)
model, meter = mlp(), Meter()
opt = torch.optim.Adam(model.parameters(), lr=0.05)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
loader = DataLoader(Noisy(), batch_size=5, shuffle=True)
guard = mx.Guard(
    model=model,
    optimizer=opt,
    lr_scheduler=sched,
    loader=loader,
    stateful={"meter": meter},
    directory=sys.argv[1],
)


def train_one_epoch():
    meter.reset()
    for x, y in loader:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        meter.update(loss.item(), len(y))
        guard.step_end(loss=loss)
    return meter.average


with guard:
    for _epoch in guard.epochs(5):
        sched.step(train_one_epoch())
done(model, opt.param_groups[0]["lr"])
