"""The same with a plain deque as replay memory, named as it is."""

import collections
import copy
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import mindx_elastic as mx
from tests.natural.tools import done
from tests.natural.walk import Walk

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
torch.set_num_threads(1)
world = Walk()
q = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
target = copy.deepcopy(q)
opt = torch.optim.Adam(q.parameters(), lr=1e-2)
memory = collections.deque(maxlen=50)
guard = mx.Guard(
    model=[q, target],
    optimizer=opt,
    stateful={"world": world, "memory": memory},
    directory=sys.argv[1],
)
with guard:
    for step in guard.steps(25):
        seen = world.look()
        action = random.randrange(2) if random.random() < max(0.1, 1 - step / 20) else int(q(seen).argmax())
        after, reward, over = world.step(action)
        memory.append((seen, action, reward, after, over))
        if over:
            world.reset()
        s, a, r, n, o = zip(*random.choices(memory, k=8), strict=True)
        s, a, r, n, o = torch.stack(s), torch.tensor(a), torch.tensor(r), torch.stack(n), torch.tensor(o).float()
        with torch.no_grad():
            wanted = r + 0.9 * target(n).max(1).values * (1 - o)
        opt.zero_grad()
        F.smooth_l1_loss(q(s).gather(1, a[:, None])[:, 0], wanted).backward()
        opt.step()
        if step % 5 == 0:
            target.load_state_dict(q.state_dict())
        guard.step_end()
done(q, target)
