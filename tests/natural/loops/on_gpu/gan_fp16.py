"""A GAN in fp16: one scaler, two optimizers, the generator every other step; noise is drawn on the device."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mindx_elastic as mx
from tests.natural.tools import done, gpu, points

device = gpu()
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)).to(device)
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1)).to(device)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=4)
loader = DataLoader(points(), batch_size=6, shuffle=True, drop_last=True)
guard = mx.Guard(
    model=[generator, critic],
    optimizer=[opt_g, opt_c],
    scaler=scaler,
    loader=loader,
    directory=sys.argv[1],
)
with guard:
    for _epoch in guard.epochs(3):
        for real, _ in loader:
            with torch.autocast("cuda", torch.float16):
                fake = generator(torch.randn(len(real), 4, device=device))
                scores = critic(real.to(device)).float(), critic(fake.detach()).float()
                loss_c = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
            opt_c.zero_grad()
            scaler.scale(loss_c).backward()
            scaler.step(opt_c)
            if guard.step % 2 == 0:
                with torch.autocast("cuda", torch.float16):
                    loss_g = F.softplus(-critic(fake).float()).mean()
                opt_g.zero_grad()
                scaler.scale(loss_g).backward()
                scaler.step(opt_g)
            scaler.update()
            guard.step_end(loss_c=loss_c)
done(generator, critic, scaler.get_scale())
