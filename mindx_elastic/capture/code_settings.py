"""What decides about a training and is in the program's code, not in a state that a checkpoint brings back.

That is: plain numbers that modules have as attributes (a dropout's `p`, a norm's `eps`), a `LambdaLR`'s functions, and
what the data set of a loader goes through.

They are compared by value, as they are before the first step. A function is known by what it gives at some steps; the
numbers that it reads are there to name the cause. All modules of a class are one list, because many have the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mindx_elastic.capture.components import Component, ModuleComponent, PlainComponent
from mindx_elastic.capture.data_listing import first_difference
from mindx_elastic.capture.plain_component import GoesThroughData
from mindx_elastic.core.looks import askable, attributes_of, items_of

__all__ = ["changed_in_code", "settings_in_code"]

Settings = Mapping[str, Mapping[str, Any]]
"""By object and setting. Of a function's steps and of a class's modules: a list of [value, how many in a row]."""

_STEPS = (0, *(digit * 10**power for power in range(5) for digit in (1, 2, 5)), 100_000)
_FACTOR, _LISTING = "factor", "listing"
_MOST_RUNS = 64
_LARGEST = 1e9  # beyond are times and identities
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")


def settings_in_code(components: Mapping[str, Component]) -> Settings:
    """What the program has given, before anything is loaded. Main thread; calls the functions of schedulers."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, component in components.items():
        if isinstance(component, ModuleComponent):
            found[name] = _of_modules(component.module)
        elif isinstance(component, PlainComponent) and isinstance(component.target, LRScheduler):
            found[name] = dict(_of_functions(component.target))
        elif isinstance(component, PlainComponent) and isinstance(component.target, GoesThroughData):
            found[name] = {_LISTING: listing} if (listing := component.target.listing()) else {}
    return {name: given for name, given in found.items() if given}


def changed_in_code(now: Settings, begun: object) -> Iterator[str]:
    """A line for each object that is given otherwise than when the training began. `begun`: as in its file."""
    for name, given in now.items():
        theirs = begun.get(name) if isinstance(begun, Mapping) else None
        if not isinstance(theirs, Mapping):
            continue
        if difference := first_difference(given.get(_LISTING), theirs.get(_LISTING)):
            yield (
                f"{name} goes on over another data set than its training began with, so samples may come twice or "
                f"never: {difference}. To go on as before, list files in a fixed order (sorted) and seed what divides"
            )
        both = given.keys() & theirs.keys() - {_LISTING}
        changed = [key for key in given if key in both and given[key] != theirs[key]]
        factors = [key for key in changed if key.startswith(_FACTOR)]
        if any(key.startswith(_FACTOR) for key in given):  # else the numbers that it reads decide about nothing
            changed = [*(key for key in changed if key not in factors), factors[0]] if factors else []
        if changed:
            told = "; ".join(_difference(key, given[key], theirs[key]) for key in changed[:4])
            yield (
                f"{name} goes on otherwise than its training began, for this is in the program's code and in no "
                f"checkpoint: {told}. To go on as before, give it what it had; to keep the change, do nothing"
            )


def _difference(key: str, now: Any, begun: Any) -> str:
    if not (isinstance(now, list) and isinstance(begun, list)):
        return f"{key} is {now} in the program and was {begun}"
    ours, theirs = _each(now), _each(begun)
    if len(ours) != len(theirs):
        return f"{key}: {len(ours)} in the program and {len(theirs)} then"
    at = next(number for number, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
    if key.startswith(_FACTOR):
        where = f" at step {_STEPS[at]}" if at < len(_STEPS) else ""
    else:
        where = f" (number {at + 1} of {len(ours)})" if len(now) > 1 or len(begun) > 1 else ""
    return f"{key}{where} is {ours[at]} in the program and was {theirs[at]}"


def _each(runs: Sequence[Any]) -> list[Any]:
    return [value for value, count in runs for _ in range(min(int(count), 1_000_000))]


def _in_runs(values: Sequence[Any]) -> list[Any]:
    return [[value, len(list(same))] for value, same in groupby(values)]


# --- modules ---


def _of_modules(module: nn.Module) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for each in module.modules():
        kind = type(each)
        if not kind.__module__.startswith(_WRAPPERS):
            for key, value in askable(vars(each).items()):
                if key != "training" and not key.startswith("_") and _is_setting(value):
                    found.setdefault(f"{kind.__name__}.{key}", []).append(value)
    made = {key: _in_runs([list(v) if isinstance(v, tuple) else v for v in values]) for key, values in found.items()}
    return {key: runs for key, runs in made.items() if len(runs) <= _MOST_RUNS}


def _is_setting(value: object) -> bool:
    if issubclass(type(value), tuple):
        return all(_is_number(item) for _, item in items_of(value) or ())
    return _is_number(value)


def _is_number(value: object) -> bool:
    return type(value) in (bool, int, float) and abs(value) < _LARGEST  # type: ignore[arg-type]  # not NaN either


# --- functions of schedulers ---


def _of_functions(scheduler: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    functions = getattr(scheduler, "lr_lambdas", ())
    for number, function in enumerate(functions):
        inner = function.func if isinstance(function, partial) else function
        of_group = f" of group {number}" if len(functions) > 1 else ""
        if isinstance(inner, MethodType):  # not called: it may count its calls
            owner = type(inner.__self__).__name__
            read = attributes_of(inner.__self__).items()
            yield from ((f"{owner}.{name}{of_group}{where}", value) for name, value in read if _is_number(value))
        elif isinstance(inner, FunctionType):  # an object has a state of its own, which is in the scheduler's
            yield from ((f"{name}{of_group}{where}", value) for name, value in _numbers_read(function, inner))
            yield f"{_FACTOR}{of_group}{where}", _in_runs([_given(function, step) for step in _STEPS])
    for number, each in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _of_functions(each, f" of scheduler {number}")


def _numbers_read(function: Any, inner: FunctionType) -> Iterator[tuple[str, Any]]:
    code, read = inner.__code__, dict(function.keywords) if isinstance(function, partial) else {}
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        try:
            read[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    read |= {name: inner.__globals__[name] for name in code.co_names if name in inner.__globals__}
    yield from ((name, value) for name, value in askable(read.items()) if _is_number(value))


def _given(function: Any, step: int) -> float | None:
    """None: nothing that can be compared; a table may end, and a root may be of less than nothing."""
    try:
        value = function(step)
        number = float(value.item() if isinstance(value, torch.Tensor) else value)
    except Exception:
        return None
    return number if math.isfinite(number) else None
