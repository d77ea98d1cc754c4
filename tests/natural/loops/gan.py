"""A GAN: two models, two optimizers, noise from the global stream."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import done, points

torch.manual_seed(0)
torch.set_num_threads(1)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
loader = DataLoader(points(), batch_size=6, shuffle=True, drop_last=True)
guard = mx.Guard(
    model=[generator, critic],
    optimizer=[opt_g, opt_c],
    loader=loader,
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for real, _ in loader:
            fake = generator(torch.randn(len(real), 4))
            opt_c.zero_grad()
            loss_c = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
            loss_c.backward()
            opt_c.step()
            if guard.step % 2 == 0:
                opt_g.zero_grad()
                F.softplus(-critic(fake)).mean().backward()
                opt_g.step()
            guard.step_end(loss_c=loss_c)
done(generator, critic)
