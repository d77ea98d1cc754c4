"""Writes the program of a seed: a training script as people write them, in which everything that goes on from step to
step is named, and the faults that it meets."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["HEAD", "SCHEDULERS", "Draft", "Program", "draw_data", "draw_model", "write"]

HEAD = """
import collections, copy, math, os, random, sys
import numpy as np
import torch
from torch import distributed as dist, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
import mindx_elastic as mx

sys.path.insert(0, os.environ["FAULT_KIT"])
from fault_kit import at, entered, passed, tell

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
torch.set_num_threads(1)
"""
HEAD_OF_RANKS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
"""
_OPTIMIZERS = {
    "SGD": "lr=0.05, momentum=0.9, nesterov=True",
    "AdamW": "lr=0.01, weight_decay=0.1",
    "Adam": "lr=0.01, amsgrad=True",
    "RMSprop": "lr=0.003, momentum=0.5, centered=True",
    **dict.fromkeys(("Adagrad", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "Adamax"), "lr=0.01"),
}
SCHEDULERS = {
    "step": "lr_scheduler.StepLR(opt, 3, 0.7)",
    "cosine": "lr_scheduler.CosineAnnealingWarmRestarts(opt, 5)",
    "onecycle": "lr_scheduler.OneCycleLR(opt, 0.05, total_steps=200, cycle_momentum=False)",
    "plateau": "lr_scheduler.ReduceLROnPlateau(opt, patience=0)",
    "lambda": "lr_scheduler.LambdaLR(opt, lambda s: 0.95**s)",
    "cyclic": "lr_scheduler.CyclicLR(opt, 0.001, 0.02, step_size_up=4, cycle_momentum=False)",
    "sequential": "lr_scheduler.SequentialLR(opt, [lr_scheduler.LinearLR(opt, 0.3, total_iters=4),"
    " lr_scheduler.ExponentialLR(opt, 0.95)], milestones=[4])",
}
_NOISE = {
    "torch": "0.1 * torch.randn(x[i].shape)",
    "numpy": "float(np.random.normal(0, 0.1))",
    "python": "random.gauss(0, 0.1)",
    "mixed": "0.1 * torch.rand(1) + random.random() * float(np.random.random())",
}
_SAMPLERS = {
    "none": "",
    "shuffle": "shuffle=True",
    "generator": "shuffle=True, generator=torch.Generator().manual_seed(3)",
    "weighted": "sampler=torch.utils.data.WeightedRandomSampler(weights, len(weights))",
    "replacement": "sampler=torch.utils.data.RandomSampler(data, replacement=True, num_samples=len(x) + 2)",
    "own": "sampler=sampler",
    "distributed": "sampler=sampler",
}
_OWN_SAMPLER = """
class Own(torch.utils.data.Sampler):
    epoch = 0

    def __len__(self):
        return len(x)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(len(x), generator=torch.Generator().manual_seed(self.epoch)).tolist())


sampler = Own()
"""
_STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        first, step = RANK + first * RANKS, step * RANKS
        for i in range(first, len(x), step):
            at("data")
            yield x[i] + 0.1 * torch.randn(1), y[i]


data = Stream()
"""
_NOISY = """
class Noisy(Dataset):
    level = 1.0

    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        at("data")
        return x[i] + self.level * (NOISE), y[i]


data = Noisy()
"""
_MODELS = {
    "mlp": "model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),"
    " nn.Linear(16, 3))",
    "spectral": "model = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(36, 16)),"
    " nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))",
    "conv": "model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),"
    " nn.Dropout(0.1), nn.Linear(64, 3))",
    "attention": "layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)\n"
    "model = nn.Sequential(nn.Flatten(1, 2), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(36, 3))",
    "lstm": """
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return self.out(self.cell(x.flatten(1, 2))[0][:, -1])


model = Rows()
""",
}
_EMA = """
class Ema:
    def __init__(self, model, decay):
        self.decay, self.shadow = decay, {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    def state_dict(self):
        return {"shadow": self.shadow, "decay": self.decay}

    def load_state_dict(self, state):
        self.decay, self.shadow = state["decay"], state["shadow"]


ema = Ema(model, 0.9)
"""
_EVALUATE = """
def evaluate():
    model.eval()
    at("eval")
    with torch.no_grad():
        value = F.cross_entropy(model(x[:10]), y[:10]).item()
    model.train()
    return value
"""
_OF_RANKS = """
def mean(value):
    value = torch.tensor(float(value))
    dist.all_reduce(value)
    return value.item() / RANKS
"""
_COLLECTIVES = {
    "mean of a step": ("end", "loss_of_all = mean(loss)"),
    "object in a step": ("end", "box = [i]\ndist.broadcast_object_list(box)"),
    "gather in a step": ("end", "found = [None] * RANKS\ndist.all_gather_object(found, i)"),
    "barrier in a step": ("updated", "dist.barrier()"),
    "mean of an epoch": ("tail", "value = mean(value)"),
    "object of an epoch": ("tail", "box = [value]\ndist.broadcast_object_list(box)\nvalue = box[0]"),
    "rank 0 alone": ("tail", "if RANK == 0:\n    print('epoch', epoch, value)\n    at('alone')\ndist.barrier()"),
    "barrier at the head": ("head", "dist.barrier()"),
}
_SHARDED = {
    "fsdp": "for each in model:\n    if [*each.parameters()]:\n        fully_shard(each)\nfully_shard(model)",
    "hsdp": "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))\n"
    "fully_shard(model, mesh=mesh)",
    "tp": "mesh = init_device_mesh('cpu', (RANKS,))\n"
    "model = parallelize_module(model, mesh, {'1': ColwiseParallel(), '3': RowwiseParallel()})",
}
_TO_BE_SPLIT = "model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.GELU(), nn.Linear(24, 3))"


@dataclass(frozen=True)
class Program:
    """One seed's script, and what happens to it."""

    seed: int
    text: str
    features: tuple[str, ...]
    faults: tuple[str, ...]
    """One of each run but the last: ``place:number:how``, see `fault_kit.at`."""
    agent: tuple[str, ...]
    """``mindx-elastic run`` or ``torchrun`` and its options; none: one process without them."""
    snapshots: str = "0"
    """``--snapshot-every``."""
    has_replicas: bool = False
    """Whether each rank holds what every other holds, so that no step is lost while one of them lives."""
    cluster: int = 0
    """Workers of a dynamic cluster; 0: none is started."""


@dataclass
class Draft:
    """The parts of a program. Lines of `parts` are indented where they are put together."""

    chance: random.Random
    ranks: int
    parallel: str = "none"
    launcher: str = "none"
    snapshots: str = "0"
    features: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    """Of the guard."""
    named: list[str] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=lambda: {"model": "model.state_dict()", "opt": "opt.state_dict()"})
    parts: dict[str, list[str]] = field(default_factory=dict)

    def choose(self, name: str, *options: str) -> str:
        found = self.chance.choice(options)
        self.features.append(f"{name}={found}")
        return found

    def has(self, name: str, probability: float) -> bool:
        found = self.chance.random() < probability
        if found:
            self.features.append(name)
        return found

    def add(self, part: str, *texts: str) -> None:
        """part: ``setup``, ``head`` of an epoch, ``inputs``, ``loss``, ``updated``, ``end`` of a step, ``tail`` of an
        epoch."""
        self.parts.setdefault(part, []).extend(texts)

    def keep(self, name: str, setup: str, result: str) -> None:
        self.add("setup", setup)
        self.named.append(name)
        if result:
            self.results[name] = result


def draw_data(d: Draft) -> None:
    size, batch = d.chance.choice([24, 38, 50]), d.chance.choice([4, 6, 8])
    if d.ranks > 1:
        size *= d.ranks  # and the part of each rank as long as that of one alone
    d.add("setup", f"x, y = torch.randn({size}, 1, 6, 6), torch.randint(3, ({size},))", f"weights = torch.rand({size})")
    # The ranks of a tensor parallel job have the same batches.
    kind = d.choose("data", "tensors", *["iterable"] * (d.parallel != "tp"), *_NOISE)
    workers = int(d.choose("workers", "0", "0", "0", "1", "2"))
    arguments = [f"batch_size={batch}"]
    if workers:
        arguments += [f"num_workers={workers}", f"persistent_workers={d.has('persistent', 0.5)}"]
    # The shares of two workers or ranks would leave a batch of one, which no BatchNorm takes.
    if d.has("drop_last", 0.3) or d.ranks > 1 or (kind == "iterable" and workers == 2):
        arguments.append("drop_last=True")
    if kind == "iterable":
        d.add("setup", _STREAM)
    else:
        d.add("setup", "data = TensorDataset(x, y)" if kind == "tensors" else _NOISY.replace("NOISE", _NOISE[kind]))
        orders: tuple[str, ...] = ("none", "shuffle", "distributed")
        if d.parallel in ("none", "tp"):
            orders = tuple(each for each in _SAMPLERS if each != "distributed")
        order = d.choose("order", *orders)
        if order == "own":
            d.add("setup", _OWN_SAMPLER)
        elif order == "distributed":
            d.add("setup", "sampler = torch.utils.data.distributed.DistributedSampler(data)")
        if order in ("own", "distributed"):
            d.add("head", "sampler.set_epoch(epoch)")
        if order in ("none", "shuffle") and d.parallel != "tp" and d.has("resumable", 0.25):
            arguments.append(f"shuffle={order == 'shuffle'}")
            d.add("setup", f"loader = mx.data.ResumableLoader(data, seed=5, {', '.join(arguments)})")
            return
        arguments += filter(None, [_SAMPLERS[order]])
        if kind != "tensors" and not workers and d.has("level", 0.25):
            d.add("head", "data.level = 1.0 / epoch")
    d.add("setup", f"loader = DataLoader(data, {', '.join(arguments)})")


def draw_model(d: Draft) -> None:
    is_sharded, in_ddp = d.parallel in _SHARDED, d.parallel in ("ddp", "zero")
    if d.parallel == "tp":
        d.add("setup", _TO_BE_SPLIT)
    else:
        d.add("setup", _MODELS[d.choose("model", *["mlp", "conv", "attention"] if is_sharded else _MODELS)])
    d.add("setup", _SHARDED.get(d.parallel, ""))
    parameters = "model.parameters()"
    if d.has("frozen first", 0.15):
        d.add("setup", "first, rest = [*model.parameters()][:2], [*model.parameters()][2:]")
        d.add("setup", "for p in first:\n    p.requires_grad_(False)")
        parameters = "rest"
        if d.parallel != "zero" and d.has("thaw", 0.5):
            d.add(
                "head",
                "if epoch == 2 and len(opt.param_groups) == 1:\n    for p in first:\n        p.requires_grad_(True)",
            )
            d.add("head", "    opt.add_param_group({'params': first, 'lr': 0.001})")
    elif d.has("groups", 0.3):
        parameters = "[{'params': [p for p in model.parameters() if p.dim() > 1]}, {'params': [p for p in "
        parameters += "model.parameters() if p.dim() <= 1], 'lr': 0.003}]"
    d.add("setup", "bare = model")
    if d.parallel not in ("none", "tp"):
        d.add("setup", "torch.manual_seed(RANK + 7)")
    if in_ddp:
        options = f"broadcast_buffers={d.chance.choice([True, False])}"
        if "thaw" not in d.features:
            options += d.chance.choice(["", "", ", find_unused_parameters=True", ", static_graph=True"])
        options += d.chance.choice(["", "", ", bucket_cap_mb=0.001", ", gradient_as_bucket_view=True"])
        d.features.append(options)
        d.add("setup", f"model = nn.parallel.DistributedDataParallel(model, {options})")
    kind = d.choose("opt", *["SGD", "AdamW", "Adam", "RMSprop", "Adagrad"] if is_sharded else _OPTIMIZERS)
    if d.parallel == "zero":
        make = f"ZeroRedundancyOptimizer({parameters}, torch.optim.{kind}, {_OPTIMIZERS[kind]})"
        d.results["opt"] = "(opt.optim.state_dict()['state'], [each['lr'] for each in opt.param_groups])"
    else:
        make = f"torch.optim.{kind}({parameters}, {_OPTIMIZERS[kind]})"
    d.add("setup", f"opt = {make}")
    d.arguments |= {"model": "model", "optimizer": "opt", "loader": "loader"}


def _scheduler(d: Draft, *, has_epochs: bool) -> None:
    kinds = [each for each in SCHEDULERS if has_epochs or each != "plateau"]
    if "thaw" in d.features:  # torch's schedulers take no group that comes later, but for those that multiply
        kinds = ["step"]
    kind = d.choose("sched", "none", "by hand", *kinds)
    if kind == "by hand":
        d.add("updated", "for group in opt.param_groups:\n    group['lr'] = 0.01 / (1 + 0.1 * guard.step)")
    if kind not in SCHEDULERS:
        return
    d.add("setup", f"sched = {SCHEDULERS[kind]}")
    d.arguments["lr_scheduler"] = "sched"
    d.results["sched"] = "(sched.last_epoch, sched.get_last_lr())"
    if kind == "plateau":
        d.add("tail", "sched.step(value)")
    elif has_epochs and d.has("sched per epoch", 0.3):
        d.add("tail", "sched.step()")
    else:
        d.add("updated", "sched.step()")


def _averages(d: Draft) -> None:
    kind = d.choose("ema", "none", "none", "class", *["averaged", "teacher"] * (d.parallel not in _SHARDED))
    if kind == "averaged":
        average = "swa_utils.AveragedModel(bare, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))"
        d.keep("ema", f"ema = {average}", "ema.state_dict()")
        d.add("updated", "ema.update_parameters(bare)")
    elif kind == "class":
        # A checkpoint takes a DTensor only where it knows its layout: in a model or an optimizer.
        text = _EMA.replace("p.detach()", "p.detach().to_local()") if d.parallel in _SHARDED else _EMA
        d.keep("ema", text, "ema.shadow")
        d.add("updated", "ema.update(model)")
    elif kind == "teacher":
        d.add("setup", "teacher = copy.deepcopy(bare).requires_grad_(False)")
        d.arguments["model"] = "[model, teacher]"
        d.results["teacher"] = "teacher.state_dict()"
        d.add("loss", "with torch.no_grad():\n    target = teacher(x).float()")
        d.add("loss", "loss = loss + 0.1 * F.mse_loss(out.float(), target)")
        d.add("updated", "with torch.no_grad():\n    for a, b in zip(teacher.parameters(), bare.parameters()):")
        d.add("updated", "        a.lerp_(b, 0.1)")


def _records(d: Draft) -> None:
    if d.has("track", 0.5):
        d.keep("track", "track = {'best': math.inf, 'bad': 0, 'losses': [], 'mean': 0.0, 'seen': 0}", "track")
        d.add("end", "track['seen'] += len(x)", "track['mean'] = 0.9 * track['mean'] + 0.1 * loss.item()")
        if d.has("sums", 0.6):
            d.add("head", "track['losses'].clear()")
            d.add("end", "track['losses'].append(loss.item())")
            d.add("tail", "value = sum(track['losses']) / len(track['losses'])")
        d.add("tail", "track['bad'] = 0 if value < track['best'] else track['bad'] + 1")
        d.add("tail", "track['best'] = min(value, track['best'])")
        if (d.ranks == 1 or {"mean of an epoch", "sums"} & {*d.features} == {"mean of an epoch"}) and d.has(
            "patience", 0.4
        ):
            d.add("tail", "if track['bad'] >= 1:\n    break")
    if d.has("memory", 0.2):
        d.keep("memory", "memory = collections.deque(maxlen=5)", "memory")
        d.add("loss", "if memory:\n    loss = loss + 0.01 * torch.stack([*memory]).mean() * loss")
        d.add("loss", "memory.append(loss.detach().clone())")


def _inputs(d: Draft) -> None:
    kind = d.choose("mix", "none", "none", "numpy", "torch", "generator")
    if kind == "numpy":
        d.add("inputs", "lam = float(np.random.beta(0.4, 0.4))", "x = lam * x + (1 - lam) * x.flip(0)")
    elif kind == "torch":
        d.add("inputs", "x = x + 0.1 * torch.randn_like(x)")
    elif kind == "generator":
        d.keep("own", "own = torch.Generator().manual_seed(9)", "")
        d.add("inputs", "x = x + 0.1 * torch.randn(x.shape, generator=own)")


def _step(d: Draft, windows: int) -> str:
    """The function that makes a step; `i` counts them from 1 in an epoch."""
    scaler = d.parallel in ("none", "ddp") and d.has("scaler", 0.2)
    critic = d.ranks == 1 and d.has("second optimizer", 0.12)
    lines = [*d.parts.get("inputs", ())]
    if (
        windows > 1
        and d.parallel in ("ddp", "zero")
        and "static_graph" not in str(d.features)
        and d.has("no_sync", 0.6)
    ):
        lines.append(f"model.require_backward_grad_sync = i % {windows} == 0 or is_last")
    if d.has("autocast", 0.15):
        lines += ["with torch.autocast('cpu', torch.bfloat16):\n    out = model(x)"]
    else:
        lines += ["out = model(x)"]
    lines += ["loss = F.cross_entropy(out.float(), y)", *d.parts.get("loss", ())]
    if critic:
        d.add("setup", "critic = nn.Linear(3, 1)", "opt2 = torch.optim.Adam(critic.parameters(), lr=0.02)")
        models = d.arguments["model"].strip("[]")
        d.arguments |= {"model": f"[{models}, critic]", "optimizer": "[opt, opt2]"}
        d.results["critic"] = "critic.state_dict()"
        lines.append("loss = loss + 0.01 * critic(out.float()).mean()")
    if scaler:
        d.add("setup", "scaler = torch.amp.GradScaler('cpu', growth_interval=3)")
        d.arguments["scaler"] = "scaler"
        d.results["scaler"] = "scaler.state_dict()"
    lines += ["at('backward')", f"{'scaler.scale(loss)' if scaler else 'loss'}.backward()"]
    update = ["scaler.unscale_(opt)"] * scaler
    if d.has("clip", 0.3):
        update.append("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
    update += ["at('update')", "scaler.step(opt)" if scaler else "opt.step()"]
    update += ["opt2.step()", "opt2.zero_grad()"] * critic
    update += ["opt.zero_grad()", *["scaler.update()"] * scaler, "at('updated')", *d.parts.get("updated", ())]
    if windows > 1:
        lines += [f"if i % {windows} == 0 or is_last:", textwrap.indent("\n".join(update), "    ")]
    else:
        lines += update
    lines += [*d.parts.get("end", ()), "at('end')", "return loss"]
    return "def step(x, y, i, is_last):\n    at('forward')\n" + textwrap.indent("\n".join(lines), "    ")


def _loop(d: Draft, kind: str, evaluation: str) -> str:
    """The body of the function `train`."""
    outside = "with guard.outside_step():\n    evaluate()"
    head = f"if guard.step and guard.step % 3 == 0:\n{textwrap.indent(outside, '    ')}" if evaluation == "head" else ""
    after = f"if guard.step % 4 == 0:\n{textwrap.indent(outside, '    ')}" if evaluation == "outside" else ""
    if kind == "steps":
        count = d.chance.choice([7, 12, 17])
        again = "    batches = iter(loader)\n    xs, ys = next(batches)"
        fetch = f"try:\n    xs, ys = next(batches)\nexcept StopIteration:\n{again}"
        end = ["guard.step_end(loss=loss)", "passed(guard.step, model)"]
        body = [head, fetch, "loss = step(xs, ys, i, False)", *end, after]
        inner = textwrap.indent("\n".join(filter(None, body)), "    ")
        return f"batches = iter(loader)\nfor i in guard.steps({count}):\n{inner}"
    body = ["loss = step(xs, ys, i, is_last)", "guard.step_end(loss=loss)", "passed(guard.step, model)", after]
    if kind == "ahead":
        before = "batches = iter(loader)\nahead, i = next(batches, None), 0\nwhile ahead is not None:"
        body = ["(xs, ys), ahead = ahead, next(batches, None)", "is_last = ahead is None", *body]
    elif kind == "enumerate":
        before = "for i, (xs, ys) in guard.enumerate(loader, start=1):"
        body = [head, "is_last = i == len(loader)" if "data=iterable" not in d.features else "is_last = False", *body]
    else:
        before, body = "i, is_last = 1, False\nfor xs, ys in loader:", [head, *body]
    inner = textwrap.indent("\n".join(filter(None, body)), "    ")
    tail = ["at('tail')", "value = evaluate()" if evaluation == "tail" else "value = loss.item()"]
    lines = ["at('head')", "model.train()", *d.parts.get("head", ()), before, inner, *tail, *d.parts.get("tail", ())]
    lines.append("at('tailed')")
    return f"for epoch in guard.epochs({d.chance.choice([2, 3])}):\n" + textwrap.indent("\n".join(lines), "    ")


def _faults(d: Draft, *, has_epochs: bool, evaluates: bool) -> list[str]:
    """Faults of each run, at places to which the program comes, though not always so often."""
    places = ["forward", "backward", "update", "updated", "end", "after"] * 2
    places += (
        ["head", "tail", "tailed"] * has_epochs + ["eval"] * evaluates + ["alone"] * ("rank 0 alone" in d.features)
    )
    if "data=tensors" not in d.features and "workers=0" in d.features:
        places.append("data")
    hows = ["SIGTERM", "SIGTERM+wait", "raise", "SIGKILL"] * 2 + ["SIGINT+wait", "SIGTERM+SIGTERM", "SIGTERM+SIGINT"]
    if d.ranks > 1:
        places += ["built", "entered"]
        hows = [*hows[:4], "SIGKILL", "SIGTERM@all", "SIGKILL@all", "SIGSTOP~1.5~SIGCONT", "SIGTERM@agent"]
        hows += ["SIGKILL@agent"] * (d.launcher != "torchrun")
        hows = [each.replace("@all", d.chance.choice(["@all", f"@{d.ranks - 1}", "@all"])) for each in hows * 2]
        # A second one while the first is being answered, and one at any moment of a step.
        for first in d.chance.sample(hows, 4):
            second = d.chance.choice(["SIGKILL", "SIGTERM", "SIGKILL"])
            later = f"~{d.chance.uniform(0, 1.2):.2f}~{second}@{d.chance.choice([*range(d.ranks), 'all'])}"
            hows += [first + later, later] if "~" not in first else [later]
    found = []
    for _ in range(d.chance.choice([1, 1, 2, 3])):
        place = d.chance.choice(places)
        most = {"head": 2, "tail": 2, "tailed": 2, "eval": 3, "data": 40, "alone": 2, "built": 1, "entered": 1}
        found.append(f"{place}:{d.chance.randint(1, most.get(place, 14))}:{d.chance.choice(hows)}")
        if d.ranks > 1:
            found[-1] += f":{0 if place == 'alone' else d.chance.randrange(d.ranks)}"
    if d.ranks > 1 and d.has("two in a run", 0.3):
        place, number = d.chance.choice(["built", "entered", "forward", "update", "after"]), d.chance.randint(1, 2)
        found[0] += f">{place}:{number}:{d.chance.choice(hows)}:{d.chance.randrange(d.ranks)}"
    return found


def _launcher(d: Draft) -> list[str]:
    """The command that starts the ranks, without the program's."""
    d.launcher = d.choose("launcher", "in-place", "in-place", "in-place", "restart", "torchrun")
    d.snapshots = d.choose("snapshots", "0", "1", "1", "3", "auto")
    if d.launcher == "torchrun":
        return ["torchrun", "--standalone", "--nproc-per-node", str(d.ranks)]
    options = ["--nproc-per-node", str(d.ranks), "--max-restarts", "9", "--recover", d.launcher]
    if d.launcher == "in-place":
        options += ["--spares", d.choose("spares", "0", "1", "2")]
    return ["mindx-elastic", "run", *options, "--snapshot-every", d.snapshots]


def write(seed: int, ranks: int = 1, *, tft: bool = False) -> Program:
    """The program of a seed for so many ranks, and its faults. `tft`: with MindIO's registration and wrapper."""
    d = Draft(random.Random(seed), ranks)
    if ranks > 1:
        d.parallel = d.choose("parallel", "ddp", "ddp", "ddp", "ddp", "zero", "fsdp", "tp", *["hsdp"] * (ranks == 4))
    kind = d.choose("loop", "epochs", "epochs", "steps", "enumerate", "ahead")
    windows = int(d.choose("windows", "1", "1", "2", "3")) if kind in ("steps", "enumerate") else 1
    if ranks > 1:
        d.add("setup", _OF_RANKS)
        for name, (place, text) in _COLLECTIVES.items():
            if (kind != "steps" or place == "end") and d.has(name, 0.15):
                d.add(place, text)
    parts: list[Callable[[Draft], None]] = [draw_data, draw_model, _averages, _records, _inputs]
    for part in parts:
        part(d)
    if tft:
        d.add("setup", "opt = mx.OptTFTWrapper(opt)")
        d.arguments["policies"] = "mx.TFTRegister(0, '127.0.0.1', 30051, sys.argv[1]).exit_policies()"
    _scheduler(d, has_epochs=kind != "steps")
    step = _step(d, windows)
    evaluation = d.choose("eval", "none", "tail", "outside", "head") if kind != "ahead" else "none"
    keeping = d.choose("keep", "nothing", "snapshots", "periodic", "both")
    if keeping in ("snapshots", "both") and ranks == 1:
        d.arguments["snapshot_every"] = d.chance.choice("12")
    if keeping in ("periodic", "both"):
        d.arguments["save_every"] = d.chance.choice("23")
    if d.has("no overlap", 0.2):
        d.arguments["overlap"] = "False"
    if d.named:
        d.arguments["stateful"] = "{" + ", ".join(f"'{name}': {name}" for name in d.named) + "}"
    in_function = ranks > 1 and d.has("guard.run", 0.7)
    loop = "entered(guard.step)\n" + _loop(d, kind, evaluation)
    if in_function:
        block = f"def train():\n{textwrap.indent(loop, '    ')}\n\n\nguard.run(train)"
    else:
        block = f"with guard:\n{textwrap.indent(loop, '    ')}"
    agent = _launcher(d) if ranks > 1 else []
    arguments = ", ".join(f"{name}={value}" for name, value in d.arguments.items())
    results = "{" + ", ".join(f"'{name}': {value}" for name, value in d.results.items()) + "}"
    setup = "\n".join(d.parts["setup"])
    guard = f"guard = mx.Guard({arguments}, directory=sys.argv[1])\nat('built')"
    head = HEAD + (HEAD_OF_RANKS if ranks > 1 else "RANK, RANKS = 0, 1")
    text = "\n\n".join([head, setup, _EVALUATE, step, guard, block, f"tell({results}, guard.step)"])
    faults = _faults(d, has_epochs=kind != "steps", evaluates="evaluate()" in loop)
    has_replicas = d.parallel == "ddp"
    return Program(seed, text + "\n", tuple(d.features), tuple(faults), tuple(agent), d.snapshots, has_replicas)
