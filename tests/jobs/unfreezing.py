"""``unfreezing.py DIR``: all layers are trained from step 10 on. Before SIGTERM, in step 13, the process may take 4 MiB
more of address space."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import mindx_elastic as mx

torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(600)])
model[:-10].requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters())
with mx.Guard(model=model, optimizer=optimizer, directory=sys.argv[1], prefix="net") as guard:
    for step in guard.steps(100):
        if step == 10:
            model.requires_grad_(True)
        if step == 13:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room = pages * os.sysconf("SC_PAGE_SIZE") + (4 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            os.kill(os.getpid(), signal.SIGTERM)
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step_end()
