"""A mean teacher: the few labelled data are gone through again within an epoch, and from their begin in each epoch."""

import copy
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import done, mlp, points

torch.manual_seed(0)
torch.set_num_threads(1)
student = mlp()
teacher = copy.deepcopy(student).requires_grad_(False)
opt = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
labelled = DataLoader(points(12), batch_size=4, shuffle=True)
unlabelled = DataLoader(points(30, seed=2), batch_size=6, shuffle=True)
guard = mx.Guard(model=[student, teacher], optimizer=opt, loader=[unlabelled, labelled], directory=sys.argv[1])
with guard:
    for epoch in guard.epochs(4):
        batches = iter(labelled)
        for u, _ in unlabelled:
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(labelled)
                x, y = next(batches)
            with torch.no_grad():
                target = teacher(u + 0.1 * torch.randn_like(u)).softmax(1)
            loss = F.cross_entropy(student(x), y) + F.mse_loss(student(u).softmax(1), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            keep = min(1 - 1 / (guard.step + 1), 0.95)
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                    old.mul_(keep).add_(new, alpha=1 - keep)
            guard.step_end(loss=loss)
        print("epoch", epoch, "loss", loss.item())
done(student, teacher)
