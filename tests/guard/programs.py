"""Small trainings as users write them, each with what the guard must say of it: nothing, a note, or a refusal.

`run` executes one as ``train.py`` in this process. ``step(...)`` trains one step; ``...`` stands for what it needs.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

__all__ = ["EXACT", "LATE_AVERAGE", "NOTED", "REFUSED", "run"]

_PRELUDE = """
import copy, random
from collections import deque
from types import SimpleNamespace
import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import *
from torch.optim.swa_utils import AveragedModel
from mindx_elastic import Guard

torch.manual_seed(0)

def make(n=3, m=3):
    return nn.Sequential(nn.Linear(n, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, m))

def update(loss, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()

net = make()
opt = torch.optim.Adam(net.parameters())
"""

_LOOP = """
with Guard(directory=DIRECTORY, **PARTS) as guard:
    for epoch in guard.epochs(EPOCHS):
        for number in guard.steps(STEPS):
            x = torch.randn(5, 3)
            step()
            guard.step_end()
        after_epoch()
notes = guard._unmanaged.notes
"""


_LOOP_OF_STEPS = """
with Guard(directory=DIRECTORY, **PARTS) as guard:
    for number in guard.steps(EPOCHS * STEPS):
        x = torch.randn(5, 3)
        step()
        if number % STEPS == 0: after_epoch()
        guard.step_end()
notes = guard._unmanaged.notes
"""


def run(name: str, source: str, directory: Path, *, file: Path | None = None, **options: Any) -> tuple[str, ...]:
    """Train `source` for twelve steps; returns the notes. Raises what it raises. `file`: where to have it as text."""
    parts = {"STEPS": 6, "EPOCHS": 2, "after_epoch": lambda: None, "DIRECTORY": directory, "OPTIONS": options}
    space: dict[str, Any] = {"__name__": f"programs.{name}", **parts}
    body = textwrap.dedent(source)
    body = body if "with Guard(" in body else body + (_LOOP if file is None else _LOOP_OF_STEPS)
    text = (_PRELUDE + body).replace("**PARTS)", "**PARTS, **OPTIONS)")
    if file is not None:
        file.write_text(text, encoding="utf-8")
    exec(compile(text, str(file or "/somewhere/train.py"), "exec"), space)  # noqa: S102 - as Python runs a script
    notes: tuple[str, ...] = space["notes"]
    return notes


_STEP = "def step(): update(net(x).square().mean(), opt)\n"

EXACT = {
    "weights that are exchanged and put back after the boundary": """
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.randn(20, 3)), 5)
        PARTS = dict(model=net, optimizer=opt, loader=loader)
        with Guard(directory=DIRECTORY, **PARTS) as guard:
            for epoch in guard.epochs(EPOCHS):
                for x, in loader:
                    update(net(x).square().mean(), opt); guard.step_end()
                    own = [p.detach().clone() for p in net.parameters()]
                    with torch.no_grad():
                        for p in net.parameters(): p.mul_(0.5)
                        for p, o in zip(net.parameters(), own): p.copy_(o)
        notes = guard._unmanaged.notes
        """,
    "a frozen teacher in the optimizer, which goes to another memory": """
        teacher = make().eval().requires_grad_(False)
        opt = torch.optim.Adam([*net.parameters(), *teacher.parameters()])
        PARTS = dict(model=net, optimizer=opt)
        def step():
            for p in teacher.parameters(): p.data = p.data.clone()
            update((net(x) - teacher(x)).square().mean(), opt)
        """,
    "a trainer object that keeps all": """
        class Trainer:
            def __init__(self):
                self.net, self.opt = make(), None
                self.opt = torch.optim.Adam(self.net.parameters())
                self.ema = AveragedModel(self.net)
                self.rng = np.random.default_rng(3)
                self.best = 0.0
            def state_dict(self):
                return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "ema": self.ema.state_dict(),
                        "rng": str(self.rng.bit_generator.state)}
            def load_state_dict(self, state): pass
            def step(self):
                noise = float(self.rng.normal())
                update((self.net(x) + noise).square().mean(), self.opt); self.ema.update_parameters(self.net)
        trainer = Trainer()
        PARTS = dict(model=trainer.net, optimizer=trainer.opt, stateful={"trainer": trainer})
        def step(): trainer.step()
        """,
    "parts of the named model under other names": """
        class Both(nn.Module):
            def __init__(self, a, b):
                super().__init__(); self.a, self.b = a, b
        backbone, head = make(), nn.Linear(3, 2)
        system = Both(backbone, head)
        opt = torch.optim.Adam([{"params": backbone.parameters()}, {"params": head.parameters(), "lr": 0.1}])
        PARTS = dict(model=system, optimizer=opt)
        def step(): update(head(backbone(x)).square().mean(), opt)
        """,
    "what an earlier training has left": """
        old_net = make(); old_opt = torch.optim.Adam(old_net.parameters()); old_sched = StepLR(old_opt, 1)
        old_ema = AveragedModel(old_net); old_rng = np.random.default_rng(0); history = [torch.ones(2)]
        old_scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            old_scaler.scale(old_net(torch.randn(5, 3)).sum()).backward()
            old_scaler.step(old_opt); old_scaler.update(); old_sched.step(); old_ema.update_parameters(old_net)
            old_rng.normal()
        first_sched = StepLR(opt, 1)
        opt.step(); first_sched.step(); first_sched.step()
        sched = StepLR(opt, 2)
        PARTS = dict(model=net, optimizer=opt, lr_scheduler=sched)
        def step(): update(net(x).square().mean(), opt); sched.step()
        """,
    "inner optimizers that are made again, or set back": """
        fast = torch.zeros(3, requires_grad=True)
        inner = torch.optim.Adam([fast], lr=0.1); start = copy.deepcopy(inner.state_dict())
        PARTS = dict(model=net, optimizer=opt)
        def step():
            global attack
            delta = torch.zeros_like(x, requires_grad=True)
            attack = torch.optim.Adam([delta], lr=0.1)
            with torch.no_grad(): fast.zero_()
            inner.load_state_dict(start)
            for _ in range(3): update((net(x + delta) - fast).square().mean(), inner, attack)
            update((net(x + delta.detach()) - fast.detach()).square().mean(), opt)
        """,
    "a second optimizer without state": """
        head = net[3]; sgd = torch.optim.SGD(head.parameters(), lr=0.01)
        PARTS = dict(model=net, optimizer=opt)
        def step(): update(net(x).square().mean(), opt, sgd)
        """,
    "a wrapper with the state of the inner optimizer": """
        class Clipped(torch.optim.Optimizer):
            def __init__(self, inner):
                self.inner = inner
                super().__init__(inner.param_groups, inner.defaults)
                self.param_groups, self.state = inner.param_groups, inner.state
            def step(self, closure=None):
                for group in self.param_groups: torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
                self.inner.step(closure)
        clipped = Clipped(opt)
        PARTS = dict(model=net, optimizer=clipped)
        def step(): update(net(x).square().mean(), clipped)
        """,
    "generators that are seeded in each step, made again or named": """
        noise, rng, old = torch.Generator(), random.Random(0), np.random.RandomState(0)
        kept, kept_noise, kept_old = np.random.default_rng(0), torch.Generator(), random.Random(4)
        PARTS = dict(model=net, optimizer=opt, stateful={"rng": kept, "noise": kept_noise, "old": kept_old})
        def step():
            global made, made_old
            noise.manual_seed(guard.position.step); rng.seed(guard.position.step); old.seed(guard.position.step)
            made, made_old = np.random.default_rng(guard.position.step), np.random.RandomState(guard.position.step)
            extra = torch.randn(5, 3, generator=noise) + torch.randn(5, 3, generator=kept_noise)
            numbers = old.rand() + made.normal() + made_old.rand() + kept.normal() + kept_old.random() + rng.random()
            update(net(x + extra * float(numbers)).square().mean(), opt)
        """,
    "an evaluation with everything of its own": """
        probe = make(); probe_opt = torch.optim.Adam(probe.parameters()); rng = np.random.default_rng(0)
        probe_sched = StepLR(probe_opt, 1); seen = []
        PARTS = dict(model=net, optimizer=opt)
        def step():
            update(net(x).square().mean(), opt)
            with guard.outside_step():
                update((probe(x) - float(rng.normal())).square().mean(), probe_opt); probe_sched.step()
                seen.append(x)
        """,
    "a scaler that is switched off": """
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        PARTS = dict(model=net, optimizer=opt)
        def step():
            opt.zero_grad(); scaler.scale(net(x).square().mean()).backward(); scaler.step(opt); scaler.update()
        """,
}

REFUSED = {
    "a criterion with weights": (
        """
        class Centers(nn.Module):
            def __init__(self):
                super().__init__(); self.centers = nn.Parameter(torch.zeros(3))
        criterion = Centers()
        opt = torch.optim.Adam([*net.parameters(), *criterion.parameters()])
        PARTS = dict(model=net, optimizer=opt)
        def step(): update((net(x) - criterion.centers).square().mean(), opt)
        """,
        (
            'optimizer "optimizer" trains 1 parameter that none of the guard\'s objects holds: "criterion.centers". '
            "Write Guard(model=[..., criterion], ...)"
        ),
    ),
    "a temperature": (
        """
        log_alpha = torch.zeros(1, requires_grad=True); alpha_opt = torch.optim.Adam([log_alpha], lr=0.1)
        PARTS = dict(model=net, optimizer=[opt, alpha_opt])
        def step(): update((net(x) * log_alpha.exp()).square().mean(), opt, alpha_opt)
        """,
        (
            'optimizer "optimizer_1" trains 1 parameter that none of the guard\'s objects holds: "log_alpha" (Tensor, '
            'train.py). Write Guard(stateful={"log_alpha": torch.nn.ParameterList([log_alpha])}, ...)'
        ),
    ),
    "an optimizer that steps now and then": (
        """
        disc = make(3, 1); disc_opt = torch.optim.Adam(disc.parameters())
        PARTS = dict(model=[net, disc], optimizer=opt)
        def step(): update(disc(net(x)).mean(), *([opt, disc_opt] if number % 3 == 2 else [opt]))
        """,
        'optimizer "disc_opt" (Adam, train.py) steps and is not named. Write Guard(optimizer=[..., disc_opt], ...)',
    ),
    "a scheduler that is made inside a function of the loop": (
        """
        sched = StepLR(opt, 1)
        PARTS = dict(model=net, optimizer=opt, lr_scheduler=sched)
        def train_one_epoch():
            sched = LambdaLR(opt, lambda n: min(1.0, n / 5))
            for number in guard.steps(STEPS):
                update(net(torch.randn(5, 3)).square().mean(), opt); sched.step(); guard.step_end()
        with Guard(directory=DIRECTORY, **PARTS) as guard:
            for epoch in guard.epochs(EPOCHS):
                train_one_epoch()
        notes = guard._unmanaged.notes
        """,
        (
            'scheduler "sched" (LambdaLR, train_one_epoch() in train.py) belongs to an optimizer of the guard, steps '
            "and is not named. Write Guard(lr_scheduler=[..., sched], ...), with one that is made before the guard"
        ),
    ),
    "a loader that is made again in each epoch": (
        """
        from torch.utils.data import DataLoader, TensorDataset
        def load(): return DataLoader(TensorDataset(torch.randn(20, 3)), 5)
        loader = load()
        PARTS = dict(model=net, optimizer=opt, loader=loader)
        with Guard(directory=DIRECTORY, **PARTS) as guard:
            for epoch in guard.epochs(EPOCHS):
                if epoch > 1: loader = load()
                for x, in loader:
                    update(net(x).square().mean(), opt); guard.step_end()
        notes = guard._unmanaged.notes
        """,
        (
            "steps use batches of a DataLoader over TensorDataset, next to the named ones: its position is not kept. "
            "Make it once, before the guard, and write Guard(loader=loader, ...), or Guard(loader=[first, second], "
            "...) for several; for one that is made in each round, one over a data set"
        ),
    ),
    "a scaler": (
        """
        scaler = torch.amp.GradScaler("cpu")
        PARTS = dict(model=net, optimizer=opt)
        def step():
            opt.zero_grad(); scaler.scale(net(x).square().mean()).backward(); scaler.step(opt); scaler.update()
        """,
        'scaler "scaler" (GradScaler, train.py) is used and not named. Write Guard(scaler=scaler, ...)',
    ),
    "an average": (
        """
        class Trainer:
            def __init__(self): self.ema = AveragedModel(net)
        trainer = Trainer()
        PARTS = dict(model=net, optimizer=opt)
        def step(): update(net(x).square().mean(), opt); trainer.ema.update_parameters(net)
        """,
        (
            'module "trainer.ema" (AveragedModel, train.py) changes in the training and is not named. '
            'Write Guard(stateful={"ema": trainer.ema}, ...)'
        ),
    ),
    "an average behind the version counters": (
        """
        target = copy.deepcopy(net)
        PARTS = dict(model=net, optimizer=opt)
        def step():
            update(net(x).square().mean(), opt)
            for p, q in zip(net.parameters(), target.parameters()): q.data.mul_(0.9).add_(0.1 * p.data)
        """,
        'module "target" (Sequential, train.py) changes in the training and is not named',
    ),
    "many generators, of which not all draw in each step": (
        """
        class Env:
            def __init__(self, seed): self.rng, self.noise = random.Random(seed), np.random.default_rng(seed)
        class World:
            def __init__(self): self.rng, self.envs = torch.Generator(), [Env(seed) for seed in range(6)]
        world = World()
        PARTS = dict(model=net, optimizer=opt)
        def step(): update((net(x) + torch.randn(3, generator=world.rng) * world.envs[2].rng.random()).sum(), opt)
        """,
        (
            'generator "world.rng" (Generator, train.py) (and 1 more) draws numbers in the training and is not kept. '
            'Write Guard(stateful={"world_rng": world.rng, "world_envs_2_rng": world.envs[2].rng}, ...), '
            "or seed it in each step. Name whatever else of world changes in the training, too"
        ),
    ),
    "more generators than a line can name": (
        """
        class World:
            def __init__(self): self.envs = [random.Random(seed) for seed in range(6)]
        world = World()
        PARTS = dict(model=net, optimizer=opt)
        def step(): update((net(x) * sum(env.random() for env in world.envs)).sum(), opt)
        """,
        (
            'generator "world.envs[0]" (Random, train.py) (and 5 more) draws numbers in the training and is not kept. '
            'Write Guard(stateful={"world": world}, ...), or seed it in each step'
        ),
    ),
    "an old numpy generator in a closure": (
        """
        def make_noise():
            state = np.random.RandomState(1)
            def noise(): return float(state.rand())
            return noise
        noise = make_noise()
        PARTS = dict(model=net, optimizer=opt)
        def step(): update((net(x) * noise()).square().mean(), opt)
        """,
        'generator "noise.<state>" (RandomState, train.py) draws numbers in the training and is not kept',
    ),
}

NOTED = {
    "a teacher in training mode": (
        """
        teacher = make().requires_grad_(False)
        PARTS = dict(model=net, optimizer=opt)
        def step(): update((net(x) - teacher(x)).square().mean(), opt)
        """,
        'buffers of module "teacher" (Sequential, train.py), which is not named, change in the training',
    ),
    "an average of each epoch": (
        """
        EPOCHS = 8
        STEPS = 2
        ema = AveragedModel(net)
        PARTS = dict(model=net, optimizer=opt)
        def step(): update(net(x).square().mean(), opt)
        def after_epoch(): ema.update_parameters(net)
        """,
        'module "ema" (AveragedModel, train.py) changes between epochs and is not named',
    ),
}

LATE_AVERAGE = """
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.randn(20, 3)), 5)
        ema = copy.deepcopy(net)
        PARTS = dict(model=[net, ema], optimizer=opt, loader=loader)
        with Guard(directory=DIRECTORY, **PARTS) as guard:
            for epoch in guard.epochs(EPOCHS):
                for x, in loader:
                    update(net(x).square().mean(), opt); guard.step_end()
                    with torch.no_grad():
                        for e, p in zip(ema.parameters(), net.parameters()): e.lerp_(p, 0.1)
        notes = guard._unmanaged.notes
        """
