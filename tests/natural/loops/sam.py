"""Sharpness-aware minimization: an optimizer around another one; both are named."""

import sys

import torch
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import Noisy, done, mlp


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad, alpha=float(group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()


torch.manual_seed(0)
torch.set_num_threads(1)
model = mlp()
opt = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
loader = mx.data.ResumableLoader(Noisy(), batch_size=6, shuffle=True)
sched = torch.optim.lr_scheduler.StepLR(opt, 3, 0.7)
guard = mx.Guard(
    model=model,
    optimizer=[opt, opt.base_optimizer],
    lr_scheduler=sched,
    loader=loader,
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            opt.first_step()
            F.cross_entropy(model(x), y).backward()
            opt.second_step()
            sched.step()
            guard.step_end()
done(model)
