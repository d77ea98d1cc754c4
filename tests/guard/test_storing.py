"""What a checkpoint can hold of other people's objects, and that what it cannot hold is said at the first boundary."""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic import Guard
from mindx_elastic.errors import MismatchError, UnmanagedStateError, UnsupportedStateError, UsageError

STEPS = 6


class Stopped(Exception):
    """Ends a training behind a boundary, which is saved."""


class Projector:
    """As GaLore has one for each weight, in its state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count, self.history = rank, 0, [0.0]
        self.matrix: Any = None

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.matrix is None or self.count % 2 == 0:
            self.matrix = torch.randn(gradient.shape[0], self.rank)
        self.count += 1
        self.history.append(float(gradient.sum()))
        projected: torch.Tensor = self.matrix @ (self.matrix.T @ gradient)
        return projected


class ByProjection(torch.optim.Optimizer):
    make: Callable[[torch.Tensor], Any] = staticmethod(lambda p: Projector(2))

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "__class__": type(self)})  # as heavyball has it in its groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "projector" not in state:
                state["projector"] = self.make(p)
            p.sub_(0.1 * state["projector"].project(p.grad))
        assert self.param_groups[0]["__class__"] is ByProjection


class Packed(torch.Tensor):
    """A tensor that says float32 and is made of two others, as the 8-bit state of torchao's optimizers."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Packed:
        return cls(tensors["codes"], tensors["scale"])

    def value(self) -> torch.Tensor:
        return self.codes * self.scale

    @classmethod
    def of(cls, value: torch.Tensor) -> Packed:
        scale = value.abs().max().clamp(min=1e-6) / 127
        return cls((value / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.__name__.partition(".")[0]
        assert name in ("detach", "clone", "_to_copy", "copy_"), name
        if name == "copy_":
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return cls(args[0].codes.clone(), args[0].scale.clone())


class PackedMomentum(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            before = self.state[p]["momentum"].value() if "momentum" in self.state[p] else torch.zeros_like(p)
            self.state[p]["momentum"] = Packed.of(0.9 * before + p.grad)
            p.sub_(0.1 * self.state[p]["momentum"].value())


class SlowWeights:
    """An optimizer around another one, with what it has of each parameter under the parameter itself (Lookahead)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.slow = inner, {}  # type: tuple[Any, dict[Any, torch.Tensor]]

    @torch.no_grad()
    def sync(self) -> None:
        for p in self.inner.param_groups[0]["params"]:
            slow = self.slow.setdefault(p, torch.zeros_like(p))
            slow.lerp_(p, 0.5)
            p.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow = state["slow"]


def train(directory: Path, optimizer: Callable[[Any], Any], *, stop: int = 0, **more: Any) -> list[torch.Tensor]:
    """The weights in the end; with `stop`, those at that step, where the job stops."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    own = optimizer(model.parameters())
    outer = SlowWeights(own) if more.pop("slow", False) else None
    stateful = {**more.pop("stateful", {}), **({"slow": outer} if outer else {})}
    guard = Guard(model=model, optimizer=own, stateful=stateful, directory=directory, **more)
    with suppress(Stopped), guard:
        for step in guard.steps(STEPS):
            own.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            own.step()
            if outer is not None:
                outer.sync()
            guard.step_end()
            if step == stop:
                raise Stopped
    return [p.detach().clone() for p in model.parameters()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def packed_is_known() -> Iterator[None]:
    """`Packed` in the place of one of the classes of tensors that are made of others."""
    name, kept = "torchao.optim.subclass_8bit", (Packed.__module__, Packed.__qualname__)
    module = types.ModuleType(name)
    module.OptimState8bit = Packed  # type: ignore[attr-defined]
    before, sys.modules[name] = sys.modules.get(name), module
    Packed.__module__, Packed.__qualname__ = name, "OptimState8bit"
    yield
    Packed.__module__, Packed.__qualname__ = kept
    if before is None:
        del sys.modules[name]
    else:
        sys.modules[name] = before


@pytest.mark.usefixtures("packed_is_known")
@pytest.mark.parametrize(("optimizer", "slow"), [(ByProjection, False), (PackedMomentum, False), (sgd, True)])
def test_objects_packed_tensors_and_parameters_as_keys_come_back(
    optimizer: Callable[[Any], Any], slow: bool, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", optimizer, slow=slow)
    stopped = train(tmp_path / "job", optimizer, stop=3, slow=slow)
    assert not torch.equal(whole[0], stopped[0])
    resumed = train(tmp_path / "job", optimizer, slow=slow)
    assert all(map(torch.equal, whole, resumed))


class HasCallback(Projector):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.callback = print


class HasParameter(Projector):
    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__(2)
        self.weight = parameter


SHARED = Projector(2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: HasCallback(2),
            r"optimizer\.state\.0\.projector\.callback: a builtin.* a HasCallback may have only",
        ),
        (HasParameter, r"state\.0\.projector\.weight: it is the parameter model\.0\.weight itself"),
        (lambda p: SHARED, r"optimizer\.state\.1\.projector: the same Projector as optimizer\.state\.0\.projector"),
    ],
)
def test_what_cannot_be_stored_is_refused_at_the_first_boundary(
    make: Callable[[torch.Tensor], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByProjection, "make", staticmethod(make))
    with pytest.raises(UnmanagedStateError, match=rf"(?s)no checkpoint can hold .*{words}.*unmanaged=\"warn\""):
        train(tmp_path, ByProjection)
    assert not [*tmp_path.rglob("*.safetensors")]


def test_a_training_that_cannot_be_stored_goes_on_where_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ByProjection, "make", staticmethod(lambda p: HasCallback(2)))
    train(tmp_path, ByProjection, unmanaged="warn")
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum("no checkpoint can hold optimizer.state.0.projector.callback" in line for line in told) == 1


def test_what_cannot_be_stored_and_comes_later_is_told_before_a_stop_finds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told: list[int] = []
    with Guard(model=model, optimizer=optimizer, directory=tmp_path) as guard:
        for step in guard.steps(10):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 5:
                optimizer.state[model.bias]["lock"] = threading.Lock()
            guard.step_end()
            told += [step] * ("no step can be saved any more" in caplog.text and not told)
    assert told == [8]
    assert "optimizer.state.1.lock" in caplog.text


class Keeper:
    """Gives what it has as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def test_what_c_code_keeps_of_an_object_is_not_lost(tmp_path: Path) -> None:
    """Its attributes are not all that a generator is."""
    with pytest.raises(UnsupportedStateError, match=r"keeper\.value: value of type random\.Random"):
        train(tmp_path, sgd, stateful={"keeper": Keeper(random.Random(1))})


def test_a_state_with_an_object_needs_one_at_its_place(tmp_path: Path) -> None:
    other = types.SimpleNamespace(seen=torch.ones(2))
    train(tmp_path, sgd, stop=2, stateful={"keeper": Keeper(other)})
    with pytest.raises(MismatchError, match=r"does not fit keeper: value is not an object here"):
        train(tmp_path, sgd, stateful={"keeper": Keeper(None)})
    there = types.SimpleNamespace(seen=None)
    train(tmp_path, sgd, stateful={"keeper": Keeper(there)})
    assert torch.equal(there.seen, torch.ones(2))


class FullyShardedDataParallel(nn.Linear):
    """By its name."""


def test_fsdp1_is_refused_with_the_way_out(tmp_path: Path) -> None:
    guard = Guard(model=nn.Sequential(FullyShardedDataParallel(2, 2)), directory=tmp_path)
    with pytest.raises(UsageError, match=r"FSDP1.*fully_shard\(model\)"), guard:
        pass
