"""What a program sets once for all that follows is told when it has set it, and only where no file has it."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mindx_elastic import Guard
from mindx_elastic.errors import GracefulExit
from mindx_elastic.guard.checks.switches import Switches
from tests.guarded import no_traces, plain_environment, stop_and_wait


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)
        self.use_aux, self.shown = False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drop(self.body(x))
        out: torch.Tensor = self.head(hidden)
        return out + hidden.mean() if self.use_aux else out

    def enable_aux(self) -> None:
        self.use_aux = True


class Mixup:
    def __init__(self) -> None:
        self.enabled, self.alpha = True, 0.2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.alpha * torch.randn_like(x) if self.enabled else x


class Parts:
    """All that a program has."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.net, self.mixup = Net(), Mixup()
        self.loss = nn.HuberLoss()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.loader = DataLoader(TensorDataset(torch.randn(20, 4)), 4, shuffle=True)
        self.config: dict[str, Any] = {"noise": 0.1, "clip": None}
        self.args = argparse.Namespace(scale=1.0, mode="strong")
        self.named = {"weight": 1.0}
        self.guard = Guard(
            model=self.net,
            optimizer=self.optimizer,
            loader=self.loader,
            stateful={"named": self.named},
            directory=directory,
        )

    def step(self, x: torch.Tensor, weight: float = 1.0) -> float:
        x = self.mixup(x) + self.config["noise"] * torch.randn_like(x)
        out = self.net(x) * self.args.scale * self.named["weight"]
        loss = self.loss(out, torch.zeros_like(out)) * weight
        self.optimizer.zero_grad()
        loss.backward()
        if self.config["clip"]:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.config["clip"])
        self.optimizer.step()
        return float(loss.item())


# --- told ---


def by_attribute(parts: Parts) -> str:
    net, guard = parts.net, parts.guard
    for epoch in guard.epochs(3):
        if epoch == 2:
            net.use_aux = True
        for (x,) in parts.loader:
            parts.step(x)
            guard.step_end()
    return "net.use_aux"


def by_method(parts: Parts) -> str:
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            parts.net.enable_aux()
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
    return "parts.net.use_aux"


def of_a_library(parts: Parts) -> str:
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            parts.net.drop.p = 0.0
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
    return "parts.net.drop.p"


def of_an_object(parts: Parts) -> str:
    mixup = parts.mixup
    for epoch in parts.guard.epochs(3):
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
        if epoch in (1,):
            mixup.enabled = False
    return "mixup.enabled"


def in_a_dict(parts: Parts) -> str:
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            parts.config["clip"] = 0.1
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
    return 'parts.config["clip"]'


def in_mid_epoch(parts: Parts) -> str:
    for _ in parts.guard.epochs(3):
        for (x,) in parts.loader:
            if parts.guard.step == 7:
                parts.args.scale = 0.5
            parts.step(x)
            parts.guard.step_end()
    return "parts.args.scale"


def adjust(epoch: int, mixing: Mixup) -> None:
    if epoch == 2:
        mixing.alpha = 0.5


def in_a_function(parts: Parts) -> str:
    mixup = parts.mixup
    for epoch in parts.guard.epochs(3):
        adjust(epoch, mixup)
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
    return "mixup.alpha"


def a_variable(parts: Parts) -> str:
    phase = "warm"
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            phase = "fine"
        for (x,) in parts.loader:
            loss = parts.net(x).square().mean()
            if phase == "fine":
                loss = loss * 2
            parts.optimizer.zero_grad()
            loss.backward()
            parts.optimizer.step()
            parts.guard.step_end()
    return "phase"


def by_what_comes(parts: Parts) -> str:
    weight = 1.0
    for _ in parts.guard.epochs(3):
        last = 0.0
        for (x,) in parts.loader:
            loss = parts.net(x).square().mean() * weight
            parts.optimizer.zero_grad()
            loss.backward()
            parts.optimizer.step()
            last = loss.item()
            parts.guard.step_end()
        if last > 0.0:
            weight = 0.5
    return "weight"


def a_loss_function(parts: Parts) -> str:
    criterion: Callable[..., torch.Tensor] = nn.functional.mse_loss
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            criterion = nn.functional.l1_loss
        for (x,) in parts.loader:
            loss = criterion(parts.net(x), torch.zeros(4, 1))
            parts.optimizer.zero_grad()
            loss.backward()
            parts.optimizer.step()
            parts.guard.step_end()
    return "criterion"


def of_all_modules(parts: Parts) -> str:
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            for module in parts.net.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.1
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
    return "p of the modules of parts.net"


def behind_an_evaluation(parts: Parts) -> str:
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            parts.mixup.alpha = 0.5
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
        with parts.guard.outside_step(), torch.no_grad():
            parts.net(torch.zeros(1, 4))
    return "parts.mixup.alpha"


def by_setattr(parts: Parts) -> str:
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            setattr(parts.net, "use_aux", True)  # noqa: B010
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
    return "parts.net.use_aux"


class Trainer:
    """The loop in a method, switches in hooks that it calls."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.noise, self.stage, self.milestones = parts, 0.1, 0, [2]

    def set_stage(self, stage: int) -> None:
        self.stage = stage

    def on_epoch_begin(self, epoch: int) -> None:
        if epoch in self.milestones:
            self.set_stage(1)

    def train_epoch(self) -> None:
        for (x,) in self.parts.loader:
            self.parts.step(x + self.noise * torch.randn_like(x) if self.stage else x)
            self.parts.guard.step_end()

    def fit(self) -> None:
        for epoch in self.parts.guard.epochs(3):
            self.on_epoch_begin(epoch)
            self.train_epoch()


def in_a_trainer(parts: Parts) -> str:
    Trainer(parts).fit()
    return "self.stage"


def a_hook(parts: Parts) -> str:
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            parts.net.body.register_forward_hook(lambda module, given, out: out * 0.5)
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
    return "a hook of parts.net.body"


_TOLD = [by_attribute, by_method, of_a_library, of_an_object, in_a_dict, in_mid_epoch, in_a_function, a_variable]
_TOLD += [by_what_comes, a_loss_function, a_hook, of_all_modules, by_setattr, behind_an_evaluation, in_a_trainer]


@pytest.mark.parametrize("form", _TOLD)
def test_told(form: Callable[[Parts], str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(tmp_path)
    with parts.guard:
        name = form(parts)
    (told,) = [line for line in caplog.messages if "is set once" in line]
    where = "fit" if form is in_a_trainer else form.__name__
    assert told.startswith(f"{name} ({where}() in test_switches.py) is set once, in line ")
    assert "and is not kept" in told


def stopped_behind_it(parts: Parts) -> None:
    with parts.guard:
        for _ in parts.guard.epochs(3):
            for (x,) in parts.loader:
                if parts.guard.step == 11:
                    parts.mixup.enabled = False
                if parts.guard.step == 12:
                    stop_and_wait(SimpleNamespace(guard=parts.guard))  # type: ignore[arg-type]
                parts.step(x)
                parts.guard.step_end()


def test_told_at_a_stop_right_behind_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Between two looks; the file says so, and the next start."""
    with pytest.raises(GracefulExit):
        stopped_behind_it(Parts(tmp_path))
    assert "parts.mixup.enabled (" in caplog.text
    caplog.clear()
    again = Parts(tmp_path)
    with again.guard:
        by_attribute(again)
    assert "not bit for bit" in caplog.text and "parts.mixup.enabled (" in caplog.text


class Hooked(nn.Module):
    """As a library calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.scale, self.epoch = 0.0, 1.0, 0

    def begin_epoch(self) -> None:
        if self.epoch == 2:
            self.noise = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.noise) * self.scale


class Callback:
    def on_epoch(self, pl_module: Any) -> None:
        if pl_module.epoch == 2:
            pl_module.scale = 0.5


def test_in_classes_that_a_library_calls() -> None:
    module, callback, told = Hooked(), Callback(), list[str]()
    switches = Switches(lambda what, remedy: told.append(what))
    switches.at_entry(None, {"module": module, "callback": callback})
    kept: Any = SimpleNamespace(objects=set())
    for module.epoch in (1, 2, 3):
        module.begin_epoch()
        callback.on_epoch(module)
        switches.look(None, kept)  # no function of the program has the loop
    assert [line.partition(" is set once")[0] for line in told] == ["module.noise (Hooked)", "module.scale (Callback)"]


# --- left alone ---


def from_there_on(parts: Parts) -> None:
    phase = "warm"
    for epoch in parts.guard.epochs(3):
        if epoch >= 2:
            parts.net.use_aux, phase = True, "fine"
            parts.mixup.enabled = False
        for (x,) in parts.loader:
            parts.step(x, 2.0 if phase == "fine" else 1.0)
            parts.guard.step_end()


def what_is_kept(parts: Parts) -> None:
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            parts.optimizer.param_groups[0]["lr"] = 0.001
            parts.named["weight"] = 0.5
            parts.net.body.requires_grad_(False)
            parts.net.drop.training = False
            parts.loader.dataset.scale = 2.0  # type: ignore[attr-defined]
        for (x,) in parts.loader:
            parts.step(x * getattr(parts.loader.dataset, "scale", 1.0))
            parts.guard.step_end()


def what_is_only_printed(parts: Parts) -> None:
    accuracy, notes = 0.0, {"epoch": 0}
    for epoch in parts.guard.epochs(3):
        if epoch == 2:
            accuracy, parts.net.shown = 0.5, 2
            notes["epoch"] = epoch
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()
        print(accuracy, parts.net.shown, notes)


def by_a_mode(parts: Parts) -> None:
    for _ in parts.guard.epochs(3):
        if parts.args.mode == "strong":
            parts.mixup.alpha = 0.3
        for (x,) in parts.loader:
            parts.step(x)
            parts.guard.step_end()


def begun_anew(parts: Parts) -> None:
    for _ in parts.guard.epochs(3):
        for i, (x,) in enumerate(parts.loader):
            weight = 1.0
            if i == 3:
                weight = 0.5
            parts.step(x, weight)
            parts.guard.step_end()


def that_follows_from_what_is_kept(parts: Parts) -> None:
    """The queue of SwAV: a resumed epoch comes to the same."""
    queue = parts.net.body.weight
    for _ in parts.guard.epochs(3):
        uses_it = False
        for (x,) in parts.loader:
            if uses_it or not torch.all(queue[-1, :] == 0):
                uses_it = True
            parts.step(x, 2.0 if uses_it else 1.0)
            parts.guard.step_end()


@pytest.mark.parametrize(
    "form", [that_follows_from_what_is_kept, from_there_on, what_is_kept, what_is_only_printed, by_a_mode, begun_anew]
)
def test_left_alone(form: Callable[[Parts], None], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    parts = Parts(tmp_path)
    with parts.guard:
        form(parts)
    assert "is set once" not in caplog.text
