"""The quick walk through a module's parameters is torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.capture.tables import named_parameters, parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.none = nn.Linear(3, 3), None
        self.register_parameter("empty", None)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.own = nn.Parameter(torch.zeros(2))


class Walks(nn.Linear):
    """Shows only one of its parameters."""

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        assert isinstance(self.weight, nn.Parameter)
        yield "shown", self.weight


class Hides(nn.Module):
    """Its modules are not all that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.hidden = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_modules(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        return (each for each in super().named_modules(*arguments, **named) if "hidden" not in each[0])


def patched() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    only = "only", nn.Parameter(torch.zeros(2))
    vars(module)["named_parameters"] = lambda *arguments, **named: iter([only])
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    "none": nn.Module,
    "tied": Tied,
    "tied below": lambda: nn.ModuleDict({"a": Tied(), "b": nn.ModuleList([Tied()])}),
    "own way": lambda: Walks(2, 2),
    "own way below": lambda: nn.Sequential(nn.Linear(2, 2), Walks(2, 2)),
    "hides": Hides,
    "hides below": lambda: nn.Sequential(Hides()),
    "patched": patched,
    "script": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
    "script below": lambda: nn.ModuleList([torch.jit.script(nn.Linear(2, 2)), nn.Linear(1, 1)]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODULES)
def test_it_finds_what_torch_finds(name: str) -> None:
    module = MODULES[name]()
    for remove_duplicate in (True, False):
        if name in ("own way", "patched") and not remove_duplicate:
            continue
        expected = [(path, id(p)) for path, p in module.named_parameters(remove_duplicate=remove_duplicate)]
        assert [(path, id(p)) for path, p in named_parameters(module, remove_duplicate=remove_duplicate)] == expected
    if name not in ("own way", "patched", "script", "script below"):
        assert list(map(id, parameters(module))) == list(map(id, module.parameters()))
