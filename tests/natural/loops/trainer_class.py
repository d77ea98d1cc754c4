"""A class that trains, which keeps its counters, its best value, a generator and a factor in attributes of its own."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp

torch.manual_seed(0)
torch.set_num_threads(1)


class Trainer:
    def __init__(self, directory):
        self.model = mlp()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
        self.epoch, self.best, self.history, self.factor = 0, float("inf"), [], 1.0
        self.noise = torch.Generator().manual_seed(3)
        self.guard = mx.Guard(
            model=self.model,
            optimizer=self.opt,
            loader=self.loader,
            stateful={"trainer": mx.attributes(self, "epoch", "best", "history", "factor", "noise")},
            directory=directory,
        )

    def fit(self, epochs):
        with self.guard:
            while self.epoch < epochs:
                for x, y in self.loader:
                    self.training_step(x, y)
                self.epoch += 1

    def training_step(self, x, y):
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x + 0.1 * torch.randn(x.shape, generator=self.noise)), y)
        self.factor *= 0.98
        if loss.item() < self.best:
            self.best = loss.item()
        loss = loss * self.factor
        loss.backward()
        self.opt.step()
        self.history.append(loss.item())
        self.guard.step_end()


trainer = Trainer(sys.argv[1])
trainer.fit(3)
done(trainer.model, trainer.epoch, trainer.best, trainer.factor, sum(trainer.history))
