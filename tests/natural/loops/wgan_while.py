"""A WGAN that counts the batches of an epoch by itself, five for the critic and then a step of the generator."""

import sys

import torch
from torch import nn

import mindx_elastic as mx
from tests.natural.tools import done, points

torch.manual_seed(0)
torch.set_num_threads(1)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.RMSprop(generator.parameters(), lr=5e-3)
opt_c = torch.optim.RMSprop(critic.parameters(), lr=5e-3)
loader = torch.utils.data.DataLoader(points(), batch_size=3, shuffle=True)
guard = mx.Guard(model=[generator, critic], optimizer=[opt_g, opt_c], loader=loader, directory=sys.argv[1])
with guard:
    for _epoch in guard.epochs(3):
        batches, i = iter(loader), 0
        while i < len(loader):
            j = 0
            while j < 4 and i < len(loader):
                real, _ = next(batches)
                i, j = i + 1, j + 1
                loss = critic(generator(torch.randn(len(real), 4)).detach()).mean() - critic(real).mean()
                opt_c.zero_grad()
                loss.backward()
                opt_c.step()
                with torch.no_grad():
                    for p in critic.parameters():
                        p.clamp_(-0.05, 0.05)
            loss = -critic(generator(torch.randn(3, 4))).mean()
            opt_g.zero_grad()
            loss.backward()
            opt_g.step()
            guard.step_end(loss=loss)
done(generator, critic)
