"""What is tried: one part of a package, as a few lines in a training that is the same for all.

A text file has the parts of one kind. ``=== PACKAGE: NAME`` begins a part; then come the lines of ``make``, and
``KEY: ...`` for other fields of `Part`, whose further lines are indented. ``like: NAME`` takes what is not said from an
earlier part of the package. ``<World>`` stands for what docs/your-loop.md has for environments.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

__all__ = ["Part", "read_parts"]

_PAGE = Path(__file__).parents[2] / "docs/your-loop.md"

_HEAD = """\
import copy, hashlib, logging, os, random, sys, types
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mindx_elastic as mx

logger = logging.getLogger("mindx_elastic")  # a library may give the root logger handlers that leave INFO out
logger.addHandler(logging.StreamHandler(sys.stdout))
logger.handlers[-1].setFormatter(logging.Formatter("SAID %(levelname)s %(message)s"))
logger.setLevel(logging.INFO)
# A torchvision that was built for CUDA fails where it describes its operators beside a torch for the CPU.
sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
torch.manual_seed(0), random.seed(0), np.random.seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
"""
_LOADER = "loader = DataLoader(data, batch_size=8, shuffle=True)\n"
_OPTIMIZER = "opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
_LOOP = """\
with guard:
    for epoch in guard.epochs(3):
        {head}
        for {batch} in loader:
            opt.zero_grad()
            loss = {loss}
            {backward}
            {update}
            {step}
            guard.step_end(loss=loss)
        {epoch}
"""
_TAIL = """
h = hashlib.sha256()
for value in [v for _, v in sorted(model.state_dict().items())] + list({result}):
    value = torch.as_tensor(value).detach().cpu().contiguous().reshape(-1)
    h.update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
print("WEIGHTS", h.hexdigest()[:16], flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Lines of a program, with `model`, `data`, `loader`, `opt`, `x`, `y` and `loss` as in the loop above."""

    package: str
    """As the package index has it."""
    name: str
    """What of it: a class, or what is done with it."""
    make: str = ""
    """Lines before the guard. They may make `opt`, `loader` or another `model`."""
    named: str = ""
    """Further arguments of the guard; none of its own where they begin with ``model=``."""
    loss: str = "F.cross_entropy(model(x), y)"
    backward: str = "loss.backward()"
    update: str = "opt.step()"
    step: str = "pass"
    """After the update."""
    head: str = "pass"
    """In front of the epoch."""
    batch: str = "x, y"
    """What the loader's items are unpacked to."""
    epoch: str = "pass"
    """Behind the epoch."""
    result: str = "()"
    """Values that have to be equal at the end beside the model's."""
    whole: str = ""
    """A program of its own in place of the guard and the loop, which ends with `model` trained."""
    want: str = "equal"
    """``equal``; or ``refused`` or ``told``, with words of it behind a colon; or ``silent``: differs without a word."""
    note: str = ""
    """For the table."""

    def source(self) -> str:
        """The program, which takes its directory as its argument."""
        make = textwrap.dedent(self.make).strip() + "\n"
        text = _HEAD + ("" if "loader = " in make + self.whole else _LOADER) + make
        if self.whole:
            text += textwrap.dedent(self.whole)
        else:
            text += "" if "opt = " in make else _OPTIMIZER
            own = "" if self.named.startswith("model=") else "model=model, optimizer=opt, loader=loader, "
            text += f"guard = mx.Guard({own}{self.named}{', ' * bool(self.named)}directory=sys.argv[1])\n"
            lines = {name: textwrap.dedent(getattr(self, name)).strip() for name in ("loss", "backward", "update")}
            lines |= {"head": self.head, "batch": self.batch}
            lines["step"] = textwrap.indent(textwrap.dedent(self.step).strip(), " " * 12).strip()
            lines["epoch"] = textwrap.indent(textwrap.dedent(self.epoch).strip(), " " * 8).strip()
            text += _LOOP.format(**lines)
        return text + _TAIL.format(result=self.result)


_KEY = re.compile(rf"(like|{'|'.join(field.name for field in fields(Part))}): ?(.*)")


def read_parts(path: Path) -> Iterator[Part]:
    """All parts of a file."""
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.S)
    world = "import gymnasium as gym\n" + "\n".join(block for block in blocks if "pickle" in block)
    known: dict[tuple[str, str], Part] = {}
    for text in re.split(r"^=== ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
        title, *lines = text.replace("<World>\n", world).splitlines()
        package, name = title.split(": ", 1)
        said: dict[str, str] = {}
        key = "make"
        for line in lines:
            if found := _KEY.fullmatch(line):
                key, said[found[1]] = found.groups()
            else:
                said[key] = f"{said.get(key, '')}\n{line if key in ('make', 'whole') else line[4:]}".lstrip("\n")
        base = Part(package=package, name=name)
        if "like" in said:
            base = known[package, said.pop("like")]
        known[package, name] = part = replace(base, name=name, **said)
        yield part
