"""Objects without `state_dict` that can be named in `stateful` as they are."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.capture.adapters import attributes
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import PlainComponent, component_for
from mindx_elastic.core.position import Position
from mindx_elastic.errors import MismatchError, UnsupportedStateError, UsageError
from tests.capture.round_trip import through_format


class Transition(NamedTuple):
    state: torch.Tensor
    reward: float


class Phase(Enum):
    WARM = 1
    MAIN = 2


@dataclass
class Stats:
    best: float = 0.0
    phase: Phase = Phase.WARM
    seen: list[int] = field(default_factory=list)


GENERATORS: list[tuple[Callable[[int], Any], Callable[[Any], Any]]] = [
    (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand(3, generator=g).tolist()),
    (random.Random, lambda g: [g.gauss(0, 1) for _ in range(3)]),
    (np.random.default_rng, lambda g: [*g.normal(size=3), *(c.normal() for c in g.spawn(2))]),
    (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.normal(size=3).tolist()),
    (np.random.Philox, lambda g: np.random.Generator(g).normal(size=3).tolist()),
    (np.random.RandomState, lambda g: [g.normal() for _ in range(3)]),
]
VALUES: list[tuple[Any, Any, Callable[[Any], object]]] = [
    ({"b": 1, "a": [1, {"c": 2}]}, {"a": 0, "z": 1}, lambda v: v["a"][1].update(c=9)),
    (Counter("aab"), Counter(), lambda v: v.update("c")),
    (OrderedDict(b=1, a=2), OrderedDict(a=1), lambda v: v.move_to_end("b")),
    ({3, 4}, set(), lambda v: v.add(5)),
    (np.arange(4), np.zeros(4, int), lambda v: v.__setitem__(0, 9)),
    ({(0, 1): Phase.MAIN}, {}, lambda v: v.clear()),
    (deque([Transition(torch.ones(2), 0.5)], 4), deque(maxlen=4), lambda v: v[0].state.add_(1)),
    ([Stats(1.5, Phase.MAIN, [4])], [], lambda v: v[0].seen.append(1)),
    (Stats(1.5, Phase.MAIN, [4]), Stats(), lambda v: v.seen.append(1)),
    ([np.float32(2), np.ones(2)], [], lambda v: v[1].fill(7)),
    ([torch.zeros(3)], [torch.ones(1).expand(3)], lambda v: v[0].add_(1)),
    (torch.arange(3.0), torch.zeros(3), lambda v: v.add_(1)),
]


def drawn(make: Callable[[int], Any], draw: Callable[[Any], Any]) -> tuple[Any, Any, Callable[[Any], Any], Any]:
    one = make(1)
    draw(one)
    return one, make(2), draw, draw


@pytest.mark.parametrize(
    ("value", "fresh", "change", "show"),
    [*(drawn(*each) for each in GENERATORS), *((*each, repr) for each in VALUES)],
)
def test_it_comes_back_in_place_as_it_was_at_the_boundary(value: Any, fresh: Any, change: Any, show: Any) -> None:
    component = component_for("thing", value)
    expected = show(value)
    change(value)
    assert show(value) != expected
    component_for("thing", fresh).load(through_format(component.state()))
    assert show(fresh) == expected


def test_another_kind_of_generator_is_named() -> None:
    saved = component_for("noise", np.random.default_rng(0)).state()
    with pytest.raises(MismatchError, match=r"noise: the checkpoint holds a PCG64, .* bits come from MT19937"):
        component_for("noise", np.random.Generator(np.random.MT19937(0))).load(saved)
    with pytest.raises(MismatchError, match=r"noise: this is a torch\.Generator, and the checkpoint holds .* numpy"):
        component_for("noise", torch.Generator()).load(saved)


def test_a_parameter_keeps_its_memory_and_another_shape_is_refused() -> None:
    fresh = nn.Parameter(torch.zeros(3))
    address, saved = fresh.data_ptr(), component_for("alpha", nn.Parameter(torch.arange(3.0))).state()
    component_for("alpha", fresh).load(through_format(saved))
    assert fresh.tolist() == [0.0, 1.0, 2.0] and fresh.data_ptr() == address
    with pytest.raises(MismatchError, match=r"alpha: the checkpoint holds a tensor \[3\] of torch.float32, this"):
        component_for("alpha", torch.zeros(4)).load(saved)


class Places:
    """A small and a large tensor, named and as buffers that are not persistent, and what is kept of them."""

    def __init__(self) -> None:
        self.tensors = {"small": torch.zeros(4), "large": torch.zeros(500_000)}
        module = nn.Linear(2, 2)
        for name, tensor in self.tensors.items():
            module.register_buffer(f"its_{name}", tensor.clone(), persistent=False)
        self.tensors |= dict(module.named_buffers())
        self.collector = Collector({"model": module, "small": self.tensors["small"], "large": self.tensors["large"]})
        self.steps = 0

    def at_boundary(self) -> dict[str, float | None]:
        self.steps += 1
        self.collector.copy(Position(step=self.steps, epoch=1, step_in_epoch=self.steps, batch_num=99))
        state = self.collector.state()
        kept = {name: state[name]["value"] for name in ("small", "large")} | state["module_extras"]["model"]["buffers"]
        self.collector.leave_boundary()
        return {name: float(kept[name][-1]) if name in kept else None for name in self.tensors}


def test_changes_that_move_no_version_counter_are_kept() -> None:
    places, quiet = Places(), Places()
    expected: dict[str, float | None] = {**dict.fromkeys(places.tensors, 0.0), "its_large": None}
    assert places.at_boundary() == expected, "as every start builds it"
    for step in range(1, 14):
        for tensor in places.tensors.values():
            if tensor.numel() == 4:
                tensor.data.add_(1)  # as older code averages
            else:
                tensor.numpy()[...] += 1
        assert places.at_boundary() == dict.fromkeys(places.tensors, float(step))
    for _ in range(14):
        assert quiet.at_boundary() == expected
    for tensor in quiet.tensors.values():
        tensor.data.add_(1)  # long after the looks, and found where a file is written at the boundary
    assert quiet.at_boundary() == dict.fromkeys(places.tensors, 1.0)


class Player:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)


def test_generators_in_containers_and_objects_go_on_where_they_were() -> None:
    def players(num: int) -> list[Any]:
        return [*map(Player, range(num)), (random.Random(5), torch.Generator().manual_seed(6))]

    def draws(several: list[Any]) -> list[float]:
        own = [player.rng.random() for player in several[:-1]]
        return [*own, several[-1][0].random(), float(torch.rand((), generator=several[-1][1]))]

    first = players(3)
    draws(first)
    component = component_for("players", first)
    state = through_format(component.state())
    expected = draws(first)
    for num in (3, 1):  # a list that has grown since
        again = players(num)
        generators = {id(again[0].rng), id(again[-1][0])} if num == 3 else set()
        component_for("players", again).load(state)
        assert draws(again) == expected
        assert generators <= {id(again[0].rng), id(again[-1][0])}


class Ema:
    """As many write it: attributes only, and a reference to the model."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.model, self.decay, self.count = model, decay, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.noise = torch.Generator().manual_seed(0)
        self.lock, self.where = threading.Lock(), Path("x")

    def update(self) -> None:
        self.count += 1
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach() + torch.rand(1, generator=self.noise), 1 - self.decay)


def test_an_object_is_kept_by_its_attributes_and_what_it_refers_to_is_not_kept_twice() -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    ema, other = Ema(model), Ema(fresh)
    ema.update()
    collector = Collector({"model": model, "ema": ema})
    collector.copy(Position(step=1, epoch=1, step_in_epoch=1))
    saved = through_format(collector.state())
    assert set(saved["ema"]["plain"]) == {"decay", "count", "shadow"} and set(saved["ema"]["nested"]) == {"noise"}
    Collector({"model": fresh, "ema": other}).load(saved)
    ema.update()
    other.update()
    assert other.count == 2 and all(torch.equal(ema.shadow[name], other.shadow[name]) for name in ema.shadow)


class Trainer:
    def __init__(self) -> None:
        self.step, self.best, self.history = 0, torch.zeros(2), [1.0]
        self.noise, self.plan = torch.Generator().manual_seed(0), nn.Linear(1, 1)
        self.logger, self._rate = print, 0.1

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, value: float) -> None:
        self._rate = value

    @property
    def progress(self) -> float:
        return self.step / 10


def test_attributes_named_before_or_now_only_are_said(caplog: pytest.LogCaptureFixture) -> None:
    saved = through_format(component_for("trainer", attributes(Trainer(), "step", "rate")).state())
    component_for("trainer", attributes(Trainer(), "step", "history")).load(saved)
    assert "trainer: the attribute history is named, and not in the checkpoint" in caplog.text
    assert "trainer: the attribute rate is in the checkpoint, and not named now" in caplog.text


class Holder:
    def __init__(self, what: Any) -> None:
        self.what = what


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: 0.9, r"thing is a float, which cannot be changed in place .*stateful=\{\"state\": state\}"),
        (lambda: np.float64(1), r"thing is a float64, which cannot"),
        (lambda: print, r"thing is a builtin_function_or_method without state_dict"),
        (random.SystemRandom, r"thing is a SystemRandom, which draws from the operating system"),
        (lambda: Ema(nn.Linear(1, 1)), r"holds a Linear in model: name that by itself, stateful="),
        (lambda: Holder(object()), r"its attribute what cannot be kept for it \(thing\.what: a .*object"),
        (lambda: [1, object()], r"thing\.1: a builtins\.object cannot be kept here"),
        (lambda: LOOP, "contains itself"),
        (lambda: attributes(Trainer(), "steps"), r"no attribute 'steps': set it before .* it has step, best, history"),
        (lambda: attributes(Trainer(), "progress"), r"Trainer.progress is a property without a setter"),
        (lambda: attributes(Trainer(), "plan"), r"holds a Linear in plan: .*\"thing_plan\": thing.plan"),
        (lambda: attributes(Trainer(), "logger"), r"thing cannot keep logger"),
        (lambda: attributes(Trainer()), r"give the names of its attributes that are state"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_line_to_write(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((UsageError, UnsupportedStateError), match=words):
        component_for("thing", make())


class Memory:
    """As that of many reinforcement learners."""

    def __init__(self) -> None:
        self.space, self.other, self.make = object(), [object()], lambda: 0
        self.rewards, self.place, self.device = np.zeros(3), 0, torch.device("cpu")


def test_the_line_in_the_message_keeps_the_rest() -> None:
    first, second = Memory(), Memory()
    with pytest.raises(UsageError, match="its attributes space, other cannot be kept for it") as caught:
        component_for("memory", first)
    line = re.findall(r"stateful=\{\"memory\": (mx\.attributes\(.*?\))\}", str(caught.value))[0]
    first.rewards[1], first.place = 5, 2
    own = second.space
    saved = through_format(component_for("memory", eval(line, {"mx": mx, "memory": first})).state())  # noqa: S307
    component_for("memory", eval(line, {"mx": mx, "memory": second})).load(saved)  # noqa: S307
    assert second.place == 2 and second.rewards.tolist() == [0, 5, 0] and second.space is own


def test_a_class_that_the_program_does_not_have_yet_is_named() -> None:
    saved = component_for("replay", [Transition(torch.ones(1), 1.0)]).state()
    saved["value"][0]["__mindx_class__"] = "no_such_module:Transition"
    with pytest.raises(MismatchError, match=r"replay\.0: the checkpoint holds a no_such_module\.Transition"):
        component_for("replay", []).load(saved)
    saved["value"][0]["__mindx_class__"] = "os:system"
    with pytest.raises(MismatchError):
        component_for("replay", []).load(saved)


def test_a_buffer_that_is_slow_to_copy_is_read_at_boundaries_only(caplog: pytest.LogCaptureFixture) -> None:
    replay: deque[Any] = deque(Transition(torch.ones(1), float(i)) for i in range(3000))
    collector = Collector({"replay": replay})
    component = collector.components["replay"]
    assert isinstance(component, PlainComponent)
    for step in range(1, 8):
        collector.copy(Position(step=step, epoch=1, step_in_epoch=step, batch_num=10))
        collector.leave_boundary()
    assert component.is_heavy and "replay takes" in caplog.text and "% of a step" in caplog.text
    collector.copy(Position(step=8, epoch=1, step_in_epoch=8, batch_num=10))
    replay.append(Transition(torch.ones(1), -1.0))  # at the boundary itself it is read as it is
    assert len(collector.state()["replay"]["value"]) == 3001 and "replay" not in collector.volatile()["plain"]
    collector.copy(Position(step=9, epoch=1, step_in_epoch=9, batch_num=10))
    collector.leave_boundary()
    with pytest.raises(UnsupportedStateError, match=r"replay.*the program has gone on since"):
        collector.state()
    collector.copy(Position(step=10, epoch=1, step_in_epoch=10, batch_num=10))
    collector.leave_boundary()
    assert len(collector.state()["replay"]["value"]) == 3001  # the last boundary of an epoch is always copied
