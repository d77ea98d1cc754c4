"""The training loops as people write them, and what the package must say about each.

A loop is a file in ``loops/``, or one of these with some of its text replaced: a line of its state taken away, or
another habit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["EXACT", "LOOPS", "Exact", "Found", "Loop", "Refused", "Told", "Verdict", "Warned"]

_FOLDER = Path(__file__).parent / "loops"


@dataclass(frozen=True)
class Exact:
    """The resumed run ends with the same numbers."""


@dataclass(frozen=True)
class Refused:
    """The first run ends with an error that has these words."""

    words: str

    @property
    def saves(self) -> bool:
        """Only the loop is at fault, and the steps are kept for the corrected one."""
        return "starts over" in self.words


@dataclass(frozen=True)
class Found:
    """`mindx-elastic prove` finds it, with these words; a run by itself ends without an error."""

    words: str
    variable: str = ""
    """The variable of the program that it names as the likely cause."""
    stops: int = 3
    """From 2 on the end of the training is one of them."""
    steps: int = 0
    """``--steps``; 0: as many as `prove` takes by itself."""


@dataclass(frozen=True)
class Warned:
    """The run goes on and says these words: it may differ."""

    words: str


@dataclass(frozen=True)
class Told:
    """The first run may be silent; the first one that is resumed says these words: the variable, or the cause."""

    words: str
    found: Found | None = None
    """What `prove` says about it."""


Verdict = Exact | Refused | Warned | Found | Told


@dataclass(frozen=True)
class Loop:
    """A file in ``loops/``, or in another folder."""

    name: str
    verdict: Verdict
    change: Mapping[str, str] = field(default_factory=dict)
    """What is replaced in the file, each at its one place."""
    of: str = ""
    """The file's name, if it is not that of the loop."""
    ranks: int = 1
    folder: Path = _FOLDER

    def write(self, folder: Path) -> Path:
        """The script in `folder`. Raises ValueError unless each place of a change is there exactly once."""
        text = (self.folder / f"{self.of or self.name}.py").read_text(encoding="utf-8")
        for old, new in self.change.items():
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} is there {text.count(old)} times")
            text = text.replace(old, new)
        script = folder / f"{self.of or self.name}.py"
        script.write_text(text, encoding="utf-8")
        return script


EXACT = Exact()
_COUNTS_BY_ITSELF = Refused("starts over after a resume, for it counts by itself")
_UNNAMED_OPTIMIZER = Refused("steps and is not named")
_OTHER_WEIGHTS = "weights differ after step"

# Places in ``plain`` and ``ddp``.
_LOADER = "DataLoader(tools.Noisy(), batch_size=6, shuffle=True)"
_GUARD = "guard = mx.Guard("
_INNER = "        for x, y in loader:\n"
_ZERO = "            opt.zero_grad()\n"
_LOSS = "F.cross_entropy(model(x), y)"
_STEP = "            opt.step()\n"
_END = "            guard.step_end()\n"
_BODY = """\
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            guard.step_end()
"""
_POWERSGD = """
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

powersgd = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
model.register_comm_hook(powersgd, powerSGD_hook.powerSGD_hook)
"""
_SCHEDULED = {"loader=loader, ": "lr_scheduler=sched, loader=loader, "}


def _stateful(name: str) -> dict[str, str]:
    return {"loader=loader, ": f"loader=loader, stateful={{'{name}': {name}}}, "}


def _before(place: str, text: str) -> dict[str, str]:
    return {place: text + place}


def _after(place: str, text: str) -> dict[str, str]:
    return {place: place + text}


def _plain(name: str, verdict: Verdict, *changes: Mapping[str, str]) -> Loop:
    return Loop(name, verdict, {old: new for change in changes for old, new in change.items()}, of="plain")


def _changed(name: str, words: str, line: str, first: str = "pass") -> Loop:
    """From epoch 2 on the model is one that no start can make again. `first`: done before the optimizer is made."""
    changes = (
        _after("model = tools.mlp()\n", f"{first}\n"),
        _before(_INNER, f"        if epoch == 2:\n            {line}\n"),
    )
    return _plain(name, Refused(words), *changes)


def _ddp(name: str, verdict: Verdict, *changes: Mapping[str, str]) -> Loop:
    change = {old: new for change in changes for old, new in change.items()}
    return Loop(f"ddp, {name}", verdict, change, of="ddp", ranks=2)


def _of(name: str, verdict: Verdict, old: str, new: str = "") -> Loop:
    """The file `name` with one text replaced."""
    return Loop(f"{name} without {old.strip()[:40]}", verdict, {old: new}, of=name)


_LOADERS: Sequence[Loop] = (
    Loop("plain", EXACT),
    _plain("no optimizer is named", _UNNAMED_OPTIMIZER, {"optimizer=opt, ": ""}),
    _plain(
        "workers, and a count of batches for the log",
        EXACT,
        {_LOADER: "DataLoader(tools.Noisy(), batch_size=7, shuffle=True, num_workers=2)"},
        {_INNER: "        for i, (x, y) in enumerate(loader):\n"},
        _after(_END, "            if i % 2 == 0:\n                print(f'batch {i}: loss {loss.item():.3f}')\n"),
    ),
    _plain("a list", Refused("knows no position"), {_LOADER: "list(DataLoader(tools.points(), batch_size=6))"}),
    _plain(
        "buckets",
        EXACT,
        {
            f"loader = {_LOADER}": """
class Buckets(torch.utils.data.Sampler):
    def __init__(self, lengths):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)

    def __len__(self):
        return len(self.order) // 6

    def __iter__(self):
        for at in torch.randperm(len(self)).tolist():
            yield self.order[at * 6 : at * 6 + 6]


loader = DataLoader(tools.Noisy(), batch_sampler=Buckets([i * 7 % 13 for i in range(30)]))
"""
        },
    ),
    Loop("stream_shuffle_buffer", EXACT),
    Loop("own_data_set", EXACT),
    Loop(
        "a data set that changes with the epoch",
        EXACT,
        {_INNER: "        data.size = 12 if epoch == 1 else 30\n" + _INNER, "x + torch": "x * data.size + torch"},
        of="own_data_set",
    ),
    Loop(
        "what the data set gives follows from how often it was asked",
        Told("calls", Found("is another one", "data.calls")),
        {
            "        x, y = self": "        self.calls += 1\n        x, y = self",
            "return x + ": "return x * (1 + 0.01 * self.calls) + ",
        },
        of="own_data_set",
    ),
    _plain(
        "two loaders side by side",
        EXACT,
        _before(_GUARD, "other = DataLoader(tools.points(60, seed=2), batch_size=12, shuffle=True)\n"),
        {"loader=loader, ": "loader=[loader, other], ", _INNER: "        for (x, y), _ in zip(loader, other):\n"},
    ),
    Loop("mean_teacher", EXACT),
)
"""What a loop draws its batches from."""

_PLACES: Sequence[Loop] = (
    _plain("epochs by itself", _COUNTS_BY_ITSELF, {"guard.epochs(3)": "range(1, 4)"}),
    _plain(
        "steps",
        EXACT,
        {
            "    for epoch in guard.epochs(3):\n" + _INNER: """
    batches = iter(loader)
    for step in guard.steps(13):
        for _ in (0,):
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
"""
        },
    ),
    _plain(
        "as many batches as the loader has, by itself",
        Found("the resumed run fails with exit code 1: StopIteration"),
        {
            _INNER: "        batches = iter(loader)\n        for _ in range(len(loader)):\n"
            "            x, y = next(batches)\n"
        },
    ),
    Loop("steps_full_batch", EXACT),
    Loop("nanogpt", EXACT),
    Loop(
        "nanogpt, drawn ahead",
        Told("from_function(get_batch)", Found("from_function(get_batch)")),
        {
            "with guard:\n": "with guard:\n    x, y = get_batch()\n",
            "        x, y = get_batch()\n        loss = ": "        loss = ",
            "        opt.zero_grad": "        x, y = get_batch()\n        opt.zero_grad",
        },
        of="nanogpt",
    ),
    _plain(
        "ahead over the end of an epoch",
        EXACT,
        {
            "    for epoch in guard.epochs(3):\n" + _INNER: """
    batches = (batch for _ in iter(int, 1) for batch in loader)
    following = next(batches)
    for step in guard.steps(13):
        for _ in (0,):
            (x, y), following = following, next(batches)
"""
        },
    ),
    Loop("ahead_prefetcher", EXACT),
    _plain(
        "accumulates, and enumerates by itself",
        Found(_OTHER_WEIGHTS, "i"),
        {
            _INNER + _BODY: """
        for i, (x, y) in enumerate(loader, start=1):
            (F.cross_entropy(model(x), y) / 3).backward()
            if i % 3 == 0 or i == len(loader):
                opt.step()
                opt.zero_grad()
            guard.step_end()
"""
        },
    ),
    _plain(
        "accumulates by a count of its own: a stop waits for the last of three",
        EXACT,
        {"batch_size=6": "batch_size=4"},
        _before(_GUARD, "micro = 0\n"),
        {_ZERO: "            micro += 1\n"},
        {_STEP: "            if micro % 3 == 0:\n                opt.step()\n                opt.zero_grad()\n"},
    ),
)
"""Where a loop stands, and what it has fetched ahead."""

_PARTS: Sequence[Loop] = (
    _plain(
        "a scaler",
        EXACT,
        _before(_GUARD, "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**40, growth_interval=3)\n"),
        {"loader=loader, ": "scaler=scaler, loader=loader, ", "loss.backward()": "scaler.scale(loss).backward()"},
        {_STEP: "            scaler.step(opt)\n            scaler.update()\n"},
    ),
    _plain(
        "a schedule: warm-up by a function, then cosine",
        EXACT,
        _before(
            _GUARD,
            """
warmup = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: (step + 1) / 5)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 11)
sched = torch.optim.lr_scheduler.SequentialLR(opt, [warmup, cosine], milestones=[4])
""",
        ),
        _SCHEDULED,
        _after(_STEP, "            sched.step()\n"),
    ),
    Loop("plateau_of_a_meter", EXACT),
    _of("plateau_of_a_meter", Told("meter"), '    stateful={"meter": meter},\n'),
    Loop("two_optimizers_by_kind", EXACT),
    Loop("muon", EXACT),
    _of("muon", Told("an unnamed optimizer"), "optimizer=opt, "),
    _plain(
        "an update by hand",
        EXACT,
        {"optimizer=opt, ": ""},
        {
            _STEP: "            with torch.no_grad():\n"
            "                for p in model.parameters():\n"
            "                    p -= 0.05 * p.grad\n"
        },
        {_ZERO: "            model.zero_grad()\n"},
    ),
    Loop("swa", EXACT),
    _of("swa", Warned('module "swa" (AveragedModel'), ', stateful={"swa": swa}'),
    Loop("non_persistent_buffer", EXACT),
    _plain(
        "unfrozen after an epoch, in a group of its own",
        EXACT,
        {"torch.optim.SGD(model.parameters(), lr=0.05": "torch.optim.SGD(model[4].parameters(), lr=0.05"},
        _after("model = tools.mlp()\n", "model[:2].requires_grad_(False)\n"),
        _before(
            _INNER,
            "        if epoch >= 2 and len(opt.param_groups) == 1:\n"
            "            model[:2].requires_grad_(True)\n"
            "            opt.add_param_group({'params': model[:2].parameters(), 'lr': 1e-3})\n",
        ),
    ),
    _plain(
        "a new head after an epoch",
        EXACT,
        _before(
            _INNER,
            "        if epoch == 2:\n"
            "            model[4] = torch.nn.Linear(16, 3)\n"
            "            opt.param_groups[0]['params'] = list(model.parameters())\n",
        ),
    ),
    _changed("a head that the optimizer does not know", "were replaced", "model[4] = torch.nn.Linear(16, 3)"),
    _changed(
        "a part that goes", "model: 5.weight, 5.bias are gone", "del model[5]", "model.append(torch.nn.Linear(3, 3))"
    ),
    _changed(
        "a part that is parametrized late",
        "Build all parts before",
        "torch.nn.utils.parametrizations.weight_norm(model[4])",
    ),
    _changed(
        "a wider head",
        "model: 4.weight is now [5, 16] float32 and was [3, 16] float32",
        "model[4] = torch.nn.Linear(16, 5); opt.param_groups[0]['params'][-2:] = list(model[4].parameters())",
    ),
    Loop("two_phases", EXACT),
)
"""What a guard is told to keep."""

_OWN: Sequence[Loop] = (
    _plain(
        "evaluates with the training's streams, outside of a step",
        EXACT,
        _after(
            _END,
            "            if guard.step % 4 == 0:\n"
            "                with guard.outside_step(), torch.no_grad():\n"
            "                    model.eval()\n"
            "                    loss = sum(F.cross_entropy(model(a), b) for a, b in loader)\n"
            "                    model.train()\n",
        ),
    ),
    _plain(
        "evaluates on the training's data",
        Refused("is iterated twice at once"),
        _before(_ZERO, "            if guard.step % 4 == 3:\n                seen = [len(a) for a, _ in loader]\n"),
    ),
    Loop("early_stopping", EXACT),
    _of(
        "early_stopping",
        Found("went on for 5 steps too many", "stopping.bad", stops=8, steps=60),
        '    stateful={"stopping": stopping},\n',
    ),
    Loop("reinforce", EXACT),
    _of("reinforce", Told("baseline.mean", Found(_OTHER_WEIGHTS, "baseline.mean")), ', "baseline": baseline'),
    Loop("lstm_of_a_module", Told("state")),
    Loop("trainer_class", EXACT),
    _of("trainer_class", Told("factor"), '"factor", '),
    _of("trainer_class", Refused("Trainer has no attribute 'histroy'"), '"history", ', '"histroy", '),
    _plain(
        "a counter",
        Told("passed", Found(_OTHER_WEIGHTS, "passed")),
        _before(_GUARD, "passed = 0\n"),
        _after(_ZERO, "            passed += 1\n"),
        {_LOSS: "F.cross_entropy(model(x) / max(1.0, 3 - 0.2 * passed), y)"},
    ),
    _plain(
        "the best weights so far",
        Told("best_loss", Found(_OTHER_WEIGHTS, "best_loss")),
        _before(_GUARD, "best, best_loss = None, float('inf')\n"),
        _after(
            "            loss.backward()\n",
            "            if loss.item() < best_loss:\n"
            "                best = {name: value.clone() for name, value in model.state_dict().items()}\n"
            "                best_loss = loss.item()\n"
            "            elif loss.item() > best_loss + 0.02:\n"
            "                model.load_state_dict(best)\n",
        ),
    ),
    Loop("state_of_its_own", EXACT),
    _of("state_of_its_own", Told("scale.calls"), '("scale", "calls")', '("scale",)'),
    _of(
        "state_of_its_own",
        Told("model.3.p"),
        "            opt.zero_grad()\n",
        "            if guard.step == 3:\n                model.apply(off)\n            opt.zero_grad()\n",
    ),
    _of(
        "state_of_its_own",
        Told("is_late"),
        "            opt.step()\n",
        "            if not is_late and guard.step == 3:\n                is_late = True\n"
        "            if is_late:\n                model[0].weight.grad.mul_(0.1)\n            opt.step()\n",
    ),
    _plain(
        "the order of a set",
        Found("the script itself is not deterministic"),
        {"model = tools.mlp()": "model = tools.mlp(out=10)\nnames = list({str(n) for n in range(100, 110)})"},
        {"model(x), y": "model(x)[:, [names.index(name) for name in sorted(names)]], y"},
    ),
)
"""What the program has of its own."""

_RANKS: Sequence[Loop] = (
    Loop("ddp", EXACT, ranks=2),
    _ddp(
        "a distributed sampler",
        EXACT,
        {"mx.data.ResumableLoader": "torch.utils.data.DataLoader"},
        {"shuffle=True": "sampler=torch.utils.data.DistributedSampler(tools.Noisy())"},
        _before(_INNER, "        loader.sampler.set_epoch(epoch)\n"),
    ),
    Loop("ddp_own_sampler", EXACT, ranks=2),
    _ddp(
        "accumulation",
        EXACT,
        {_ZERO: ""},
        {"batch_size=3": "batch_size=2, drop_last=True"},
        {_INNER: "        for i, (x, y) in guard.enumerate(loader, start=1):\n"},
        {
            "            F.cross_entropy(model(x), y).backward()\n" + _STEP: """
            if i % 2 or i == len(loader):
                with model.no_sync():
                    F.cross_entropy(model(x), y).backward()
            else:
                F.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
"""
        },
        _after(_END, "        opt.zero_grad()\n"),
    ),
    _ddp(
        "gradients that are averaged by hand, and batch norm of each rank's own",
        EXACT,
        {"with guard:": "with guard, model.no_sync():"},
        _before(
            _STEP,
            "            for parameter in network.parameters():\n                dist.all_reduce(parameter.grad)\n",
        ),
    ),
    _ddp(
        "local updates from the second epoch on",
        Warned("gradients that DDP has not reduced"),
        _before(_INNER, "        model.require_backward_grad_sync = epoch == 1\n"),
    ),
    _ddp(
        "compressed gradients",
        EXACT,
        _before(_GUARD, _POWERSGD),
        _stateful("powersgd"),
    ),
    _ddp(
        "compressed gradients with a state that is not named",
        Refused("hook with state (PowerSGDState) that is not named"),
        _before(_GUARD, _POWERSGD),
    ),
    _ddp(
        "noise and an average of each rank's own",
        EXACT,
        _before(_GUARD, "ema = torch.optim.swa_utils.AveragedModel(network)\ntorch.manual_seed(dist.get_rank())\n"),
        _stateful("ema"),
        {"model(x)": "model(x + 0.1 * torch.randn_like(x))"},
        _after(_STEP, "            ema.update_parameters(network)\n"),
        {"tools.done(network)": "tools.done(network, ema)"},
    ),
    Loop("ddp_wrapped", EXACT, ranks=2),
    Loop("fsdp", EXACT, ranks=2),
)

LOOPS: Sequence[Loop] = (*_LOADERS, *_PLACES, *_PARTS, *_OWN, *_RANKS)
