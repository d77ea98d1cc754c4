"""What the function of the training has done to a survivor's objects is taken back before it is called again."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from mindx_elastic.agreement.gather import Answer
from mindx_elastic.guard.running import program_now
from mindx_elastic.rejoin.before_call import ObjectsBeforeCall, VariablesPart

counted = 0
batches: Any = None
history: list[int] = []
untouched = 7


def apart(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in a thread: the variables of those who call are compared as well, and pytest's change."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        failures: list[BaseException] = []

        def call() -> None:
            try:
                test(**fixtures)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    return run


def part_of(objects: ObjectsBeforeCall, kept: Collection[Any], rank: int, *, is_new: bool) -> VariablesPart:
    """As `guard.running.InPlaceGuard` makes it, of the caller's variables."""
    return VariablesPart(objects, program_now(kept, sys._getframe(1)), rank, is_new=is_new)


def test_hooks_are_there_once_however_often_the_function_is_called() -> None:
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("of the beginning"))
    objects = ObjectsBeforeCall({"model": model, "optimizer": optimizer})

    def train() -> None:
        model[0].register_forward_hook(lambda *_: calls.append("forward"), with_kwargs=False)
        model[1].register_forward_pre_hook(lambda *_: calls.append("pre"))
        model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
        optimizer.register_step_post_hook(lambda *_: calls.append("step"))
        first.weight.register_hook(lambda _: calls.append("gradient"))
        first.bias.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))

    train()
    objects.put_back()
    train()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert sorted(calls) == [
        *("accumulated", "backward", "forward", "gradient", "of the beginning", "pre", "step"),
    ]


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def cost(value: float) -> float:
    return value


def test_methods_of_the_guards_objects_are_wrapped_once_however_often_the_function_is_called() -> None:
    model, holder = nn.Sequential(Scaled()), SimpleNamespace(score=lambda value: value, transform=None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    objects = ObjectsBeforeCall({"model": model, "optimizer": optimizer, "holder": holder})
    steps: list[int] = []

    def train() -> None:
        for owner, name in ((model[0], "forward"), (holder, "score"), (holder, "transform")):
            wrap(owner, name)
        step: Any = optimizer.step

        def counted() -> None:
            steps.append(1)
            step()

        setattr(optimizer, "step", counted)  # noqa: B010

    def wrap(owner: Any, name: str) -> None:
        inner = getattr(owner, name) or (lambda value: value)
        setattr(owner, name, lambda *args: 3 * inner(*args))

    def values() -> list[float]:
        return [float(model(torch.ones(1))), holder.score(1.0), holder.transform(1.0) if holder.transform else 0.0]

    before = values()
    train()
    once = values()
    objects.put_back()
    assert values() == before != once
    train()
    assert values() == once
    optimizer.step()
    assert steps == [1]


def test_what_torch_has_hooked_to_a_module_stays() -> None:
    pruned: Any = nn.Linear(2, 2)
    model = nn.Sequential(pruned)
    objects = ObjectsBeforeCall({"model": model})
    prune.l1_unstructured(pruned, "weight", amount=1)
    objects.put_back()
    with torch.no_grad():
        pruned.weight_orig.fill_(2.0)
    model(torch.ones(1, 2))
    assert pruned.weight.count_nonzero() == 3 and pruned.weight.max() == 2, "it is computed in each forward"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_gradients_and_the_scalers_stage_are_those_of_the_beginning(is_enabled: bool) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
    objects = ObjectsBeforeCall({"model": model, "optimizer": optimizer, "scaler": scaler})

    def step() -> None:
        scaler.scale(model(torch.ones(1))).backward()
        scaler.unscale_(optimizer)

    step()
    with torch.no_grad():  # an evaluation that was cut off
        objects.put_back()
        assert torch.is_grad_enabled()
        step()


def test_process_groups_made_in_the_function_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import distributed_c10d

    objects = ObjectsBeforeCall({})
    assert objects.problem == ""
    world: Any = distributed_c10d._world
    monkeypatch.setattr(
        distributed_c10d, "_world", SimpleNamespace(group_count=world.group_count + 1, pg_map=world.pg_map)
    )
    assert "process groups are made inside of the function" in objects.problem


@apart
def test_variables_that_differ_from_those_of_the_new_process_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Also functions and methods that are wrapped."""
    global counted, cost
    survivor, new = ObjectsBeforeCall({}), ObjectsBeforeCall({})
    inner, forward = cost, Scaled.forward
    try:
        part_of(survivor, [], 0, is_new=False)  # the first entry
        fresh = part_of(new, [], 1, is_new=True)
        counted = 5
        history.append(1)
        cost = lambda value: 3 * inner(value)  # noqa: E731
        setattr(Scaled, "forward", lambda _, x: 3 * x)  # noqa: B010
        old = part_of(survivor, [], 0, is_new=False)
    finally:
        counted, cost = 0, inner
        history.clear()
        setattr(Scaled, "forward", forward)  # noqa: B010
    answer = old.merge([old.say(), fresh.say()]).common
    names = ['"Scaled.forward"', '"cost"', '"counted"', 'the length of "history"']
    assert answer == [[f"{name} (test_before_call.py)" for name in names], []]
    with caplog.at_level(logging.WARNING):
        old.hear(Answer(answer, None, list))
        fresh.hear(Answer(answer, None, list))
    assert len(caplog.records) == 1 and '"counted" (test_before_call.py)' in caplog.text
    again = part_of(new, [], 1, is_new=False)  # nothing has changed here since its beginning
    assert again.say()["changed"] == []


class Counted(nn.Module):
    seen: torch.Tensor
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))


@apart
def test_buffers_of_a_module_inside_a_kept_one_are_kept() -> None:
    """The program has a name for the module inside, as for that in ``model = DDP(net)``."""
    net = Counted()
    model, survivor, new = nn.Sequential(net), ObjectsBeforeCall({}), ObjectsBeforeCall({})
    net.seen = torch.ones(2)
    fresh = part_of(new, [model], 1, is_new=True)
    net.seen = torch.zeros(2)
    part_of(survivor, [model], 0, is_new=False)  # the first entry
    net.seen.add_(2)
    net.steps = 5
    old = part_of(survivor, [model], 0, is_new=False)
    named = old.merge([old.say(), fresh.say()]).common[0]
    assert [name.partition(" ")[0] for name in named] == ['"net.steps"']


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.cycle(range(7)),
        lambda: zip(itertools.count(), iter(range(9)), strict=False),
        lambda: itertools.islice(itertools.chain([1, 2], [3, 4]), 3),
        lambda: (number for number in range(5)),
    ],
    ids=["cycle", "zip", "islice", "generator"],
)
@apart
def test_an_iterator_that_goes_on_in_survivors_is_named(
    make: Callable[[], Iterator[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    global batches
    name = 'the position of "batches" (test_before_call.py)'
    try:
        batches = make()
        survivor, new = ObjectsBeforeCall({}), ObjectsBeforeCall({})
        part_of(survivor, [], 0, is_new=False)  # the first entry
        assert part_of(survivor, [], 0, is_new=False).say()["changed"] == [], "to look does not advance it"
        next(batches), next(batches)
        old = part_of(survivor, [], 0, is_new=False)
        unused, batches = batches, make()
        fresh = part_of(new, [], 1, is_new=True)
    finally:
        batches = None
    assert old.merge([old.say(), fresh.say()]).common[0] == [name]
    with caplog.at_level(logging.WARNING):
        old.hear(Answer([[name], []], None, list))
    assert "make it in that function, and advance it to guard.step" in caplog.text
    assert next(unused) != next(make())


@apart
def test_what_the_training_has_made_is_told_as_a_fact(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        train.calls = getattr(train, "calls", 0) + 1  # type: ignore[attr-defined]

    objects = ObjectsBeforeCall({})
    part_of(objects, [], 0, is_new=False)
    train()
    survivor = part_of(objects, [], 0, is_new=False)
    vars(train).clear()
    new = part_of(ObjectsBeforeCall({}), [], 1, is_new=True)
    answer = survivor.merge([survivor.say(), new.say()]).common
    name = '"train.calls" (test_what_the_training_has_made_is_told_as_a_fact() in test_before_call.py)'
    assert name in answer[1]
    with caplog.at_level(logging.INFO):
        survivor.hear(Answer(answer, None, list))
    assert "train.calls" in caplog.text and not [each for each in caplog.records if each.levelno > logging.INFO]
