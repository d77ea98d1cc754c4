"""Objects of other people whose every answer is an error: no look of ours ends a program or runs a property."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import mindx_elastic
from mindx_elastic import Guard
from mindx_elastic.errors import UsageError

OURS = str(Path(mindx_elastic.__file__).parent)


class Stopped(Exception):
    """Ends a training behind a boundary, which is saved."""


class Hostile:
    """As the stand-in of a library for what is not built yet."""

    properties_run: list[str] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.__dict__["data"] = [1, 2]

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"not built yet: {name}")

    def _fail(self, *arguments: Any) -> Any:
        raise RuntimeError("hostile")

    __len__ = __eq__ = __repr__ = __iter__ = _fail
    __hash__ = None  # type: ignore[assignment]

    @property
    def state_dict(self) -> int:
        self.properties_run.append("state_dict")
        return 1


def _counted(name: str, otherwise: Any) -> Any:
    """A special method, which answers outside of this package as `otherwise` does."""

    def method(self: Any, *arguments: Any) -> Any:
        if not _is_asked_by_us():
            return otherwise(self, *arguments)
        Silent.calls.append(name)
        raise RuntimeError(name)

    return method


def _is_asked_by_us() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != __file__:
        if OURS in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Silent:
    """Whatever we ask it, it notes and fails: also what a class it is of, and for its attributes."""

    calls: list[str] = []  # noqa: RUF012

    __getattribute__ = _counted("__getattribute__", object.__getattribute__)
    __eq__ = _counted("__eq__", object.__eq__)
    __hash__ = _counted("__hash__", object.__hash__)
    __repr__ = _counted("__repr__", object.__repr__)
    __len__ = __iter__ = __bool__ = __call__ = __getitem__ = _counted("another method", None)


class HidesItsDict:
    """As some classes of pydantic."""

    __dict__ = property(_counted("__dict__", lambda self: {}))
    __class__ = property(_counted("__class__", lambda self: HidesItsDict))


class LazyDict(dict[str, int]):
    __iter__ = keys = values = items = __getitem__ = _counted("of a dict", None)
    __len__ = copy = __iter__


class LazyList(list[int]):
    __iter__ = __getitem__ = __len__ = copy = _counted("of a list", None)


class OwnTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_asked_by_us():
            Silent.calls.append("__torch_function__")
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class OddKind(type):
    """Of classes that can be compared with nothing, and be in no table."""

    __eq__ = _counted("== of a class", type.__eq__)
    __hash__ = _counted("hash of a class", type.__hash__)
    __instancecheck__ = _counted("isinstance", type.__instancecheck__)
    __subclasscheck__ = _counted("issubclass", type.__subclasscheck__)
    __bool__ = __repr__ = __len__ = _counted("another one of a class", None)


class OfOddKind(metaclass=OddKind):
    shared: list[int] = []  # noqa: RUF012


def silent() -> list[Any]:
    tensor = torch.ones(2).as_subclass(OwnTensor)
    return [Silent(), HidesItsDict(), LazyDict(a=1), LazyList([1]), tensor, OfOddKind(), OfOddKind]


class OfProgram:
    def __init__(self) -> None:
        self.count, self.parts, self.named = 0, silent(), {"a": Silent()}
        self.one, self.two, self.three, self.four, self.five, self.six, self.seven = silent()

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Images(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.one, self.two, self.parts, self.named = Silent(), HidesItsDict(), silent(), LazyDict(a=1)
        self.three, self.helper = OfOddKind(), Hostile()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + torch.rand(())

    @property
    def dear(self) -> int:
        Hostile.properties_run.append("dear")
        return 1


class DynamicBatches(Sampler[list[int]]):
    def __init__(self) -> None:
        self.helper = Silent()

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[*range(first, first + 4)] for first in range(0, 16, 4)])

    def __len__(self) -> int:
        raise RuntimeError("not before the epoch has begun")


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.helper, self.other = Silent(), Hostile()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.full((4,), float(n)) for n in range(16)])

    def __len__(self) -> int:
        raise RuntimeError("nobody knows")


def test_a_hostile_object_that_is_named_is_refused_in_our_words(tmp_path: Path) -> None:
    guard = Guard(model=nn.Linear(1, 1), stateful={"helper": Hostile()}, directory=tmp_path)
    with pytest.raises(UsageError, match="helper is a Hostile without state_dict"), guard:
        pass


helper_of_module = Hostile(), Silent()


def train(directory: Path, loader: Any, *, stop: int = 0) -> torch.Tensor:
    torch.manual_seed(0)
    hostile, others_hostile = Hostile(), [Hostile()]
    alone, others, named, kept = silent(), OfProgram(), {"a": Silent(), "b": HidesItsDict()}, OfProgram()
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    model[0].note, model[0].notes, model[0].odd = HidesItsDict(), silent(), OfOddKind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    owners: list[Any] = [optimizer, scheduler, *model.parameters()]
    for owner in owners:
        owner.note, owner.other = silent()[:2]
    guard = Guard(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        loader=loader,
        stateful={"kept": kept},
        directory=directory,
        save_every=2,
    )
    with suppress(Stopped), guard:
        for _ in guard.epochs(2):
            for x in loader:
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                kept.count += 1
                others.count += 1
                assert alone and hostile is not None
                others_hostile.append(Hostile())
                alone, named["c"] = silent(), Silent()
                others.parts.append(Silent())
                guard.step_end(loss=loss)
                if guard.step == stop:
                    raise Stopped
    return model[0].weight.detach().clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Images(), batch_size=4, shuffle=True),
        lambda: DataLoader(Images(), batch_sampler=DynamicBatches()),
        lambda: DataLoader(Stream(), batch_size=4),
    ],
)
def test_no_look_runs_code_of_the_program(make: Callable[[], Any], tmp_path: Path) -> None:
    Hostile.properties_run.clear()
    Silent.calls.clear()
    whole = train(tmp_path / "whole", make())
    train(tmp_path / "job", make(), stop=3)
    assert torch.equal(train(tmp_path / "job", make()), whole)
    assert not Hostile.properties_run and not Silent.calls
