"""Tells what the program gives otherwise than the run that it resumes.

What stands in the objects moves in a training (by a scheduler or by hand), so it is not what is compared. Each file has
what the program had given when the training began, which the same command gives again:

* settings of optimizers, schedulers and scalers (``--lr``, the length of a schedule), and torch's seed: a start goes on
  with the checkpoint's, else it would be another training
* what no checkpoint brings back: the functions of a `LambdaLR`, which are known by what they give at some steps, and
  what a data set goes through: the program's counts from here on

With other entries of a data set, or in another order, a resumed epoch would give samples twice and others never. That
is so where files are listed as the file system gives them, where an unseeded ``random_split`` divides, or rows in
memory are shuffled. Looked at (`listing_of`) are lists of texts (names of files, also with their labels), rows that are
as many as the samples (of lists, tensors, arrays and tables) and indices: after a death or an exception no step is
compared that would show another order. No sample is made: that draws random numbers. The folder that all files are in
may be another one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler

from mindx_elastic.capture.components import Component, OptimizerComponent, PlainComponent
from mindx_elastic.capture.plain_component import GoesThroughData
from mindx_elastic.core.looks import asked, attributes_of, items_of, length_of
from mindx_elastic.core.printable import listed, printable

__all__ = ["GivenSettings", "Listing", "difference", "listing_of"]

Listing = Mapping[str, tuple[int, str]]
"""By the list's path (``dataset.samples``): its length, and a digest of some items."""

_Given = dict[str, dict[str, Any]]
"""Values by object and setting."""

_MOST = 4
_MOST_LISTS, _MOST_ITEMS, _MOST_PARTS, _MOST_VALUES = 8, 32, 4, 1024
_LISTS = (list, tuple, range, np.ndarray, torch.Tensor)
_NUMBERS = (bool, int, float)
_LABELS = (*_NUMBERS, type(None))
_PLAIN = (*_NUMBERS, str, type(None))
_OBJECTS, _CODE, _DATA, _SEED = "objects", "code", "data", "seed"
"""Keys in the file."""
_LARGEST_CHOSEN = (1 << 32) - 1
"""numpy takes no larger seed. A process that no one has seeded has 64 random bits, other ones at each start."""
_STEPS = (0, *(digit * 10**power for power in range(5) for digit in (1, 2, 5)), 100_000)
_LONGEST = 80
_SENTENCES = {
    _OBJECTS: (
        "goes on with the settings of the checkpoint: {}. To change them, set them inside of the guard's block, or "
        'start over with resume="never" in another directory'
    ),
    _CODE: (
        "goes on otherwise than its training began, for this is in the program's code and in no checkpoint: {}. To go "
        "on as before, give it what it had; to keep the change, do nothing"
    ),
    _DATA: (
        "goes on over another data set than its training began with, so samples may come twice or never: {}. To go on "
        "as before, list files in a fixed order (sorted) and seed what divides"
    ),
}
"""What is said of an object, with its name in front and the difference in it."""
_LARGEST = 1e9  # beyond are times and identities


class GivenSettings:
    """What the program has given. Training thread.

    Only of torch's own kinds of objects: what an object of the program's own class begins with may be a time or drawn.
    """

    def __init__(self, components: Mapping[str, Component]) -> None:
        """Before anything is loaded into the objects. Calls the functions of schedulers."""
        objects = {name: dict(_of(each)) for name, each in components.items() if _is_new(each)}
        is_new = len(objects) == len(components)
        code = {name: dict(_of_code(each)) for name, each in components.items() if is_new}
        loaders = {name: asked(each, "target") for name, each in components.items() if is_new}
        data = {name: dict(each.listing()) for name, each in loaders.items() if isinstance(each, GoesThroughData)}
        self._now: dict[str, _Given] = {_OBJECTS: _filled(objects), _CODE: _filled(code), _DATA: _filled(data)}
        self._seed = str(torch.initial_seed())
        self.kept: Mapping[str, Any] = {**self._now, _SEED: self._seed}
        """For the file; only ever replaced."""

    def resume(self, state: Mapping[str, Any], components: Mapping[str, Component], *, live: bool) -> list[str]:
        """The training that `state` is of goes on, which is loaded into `components`. Returns a line for each object
        whose settings that has changed, none if `live`: the objects have run in this process, and moved."""
        begun = state.get("settings_given")
        if not isinstance(begun, Mapping) or _OBJECTS not in begun:
            return []  # converted, or of an older version: from here on this start's count
        own = {} if live else {kind: self._now[kind] for kind in (_CODE, _DATA) if self._now[kind]}
        self.kept = {**begun, **own}
        if live:
            return []
        loaded = {name: dict(_of(components[name])) for name in self._now[_OBJECTS]}
        told = [
            f"{name} {sentence.format(changed)}"
            for kind, sentence in _SENTENCES.items()
            for name, given in self._now[kind].items()
            if (changed := _changed(kind, given, begun.get(kind, {}).get(name, {}), loaded.get(name, {})))
        ]
        if self._seed != begun.get(_SEED, self._seed) and int(self._seed) <= _LARGEST_CHOSEN:
            told.append(
                f"random numbers go on as in the checkpoint: torch's seed is {self._seed} in the program and "
                f"{begun[_SEED]} in it. Another seed counts in a new run only: start over with "
                'resume="never" in another directory'
            )
        return told


def _changed(kind: str, given: Mapping[str, Any], begun: Mapping[str, Any], loaded: Mapping[str, Any]) -> str:
    """The difference in words; empty: none. `loaded`: what an object has from the checkpoint."""
    if kind == _DATA:
        return difference(given, begun)
    there, shown = (begun, "was {}") if kind == _CODE else ({**begun, **loaded}, "{} in it")
    found = [
        f"{key} is {printable(value, _LONGEST)} in the program and {shown.format(printable(there[key], _LONGEST))}"
        for key, value in given.items()
        if key in begun and value not in (begun[key], there[key])
    ]
    return listed(found, _MOST, "; ")


def _filled(given: _Given) -> _Given:
    return {name: settings for name, settings in given.items() if settings}


def _is_new(component: Component) -> bool:
    """Whether it stands as the program has made it: not where an earlier block of the process has trained with it."""
    if isinstance(component, OptimizerComponent):
        return not component.local.state
    scheduler = getattr(component, "target", None)
    return not isinstance(scheduler, LRScheduler) or not _has_moved(scheduler)


def _has_moved(scheduler: Any) -> bool:
    return asked(scheduler, "last_epoch", 0) > 0 or any(map(_has_moved, asked(scheduler, "_schedulers", ())))


# --- what a checkpoint brings back ---


def _of(component: Component) -> Iterator[tuple[str, Any]]:
    if isinstance(component, OptimizerComponent):
        groups = component.local.param_groups
        for number, group in enumerate(groups):
            where = f" of group {number}" if len(groups) > 1 else ""
            yield from [(key + where, value) for key, value in _plain(group)]
    elif isinstance(component, PlainComponent):
        if isinstance(component.target, LRScheduler):
            yield from _of_scheduler(component.target.state_dict())
        elif isinstance(component.target, torch.amp.GradScaler):
            yield from _plain(component.target.state_dict())


def _of_scheduler(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from _plain(state)
    if "_milestones" in state:  # of a SequentialLR
        yield "milestones", state["_milestones"]
    for number, own in enumerate(state.get("lr_lambdas", ())):  # attributes of objects that are called
        yield from ((f"{key} of function {number}", value) for key, value in _plain(own or {}))
    for number, inner in enumerate(state.get("_schedulers", ())):  # of a SequentialLR or ChainedScheduler
        yield from ((f"{key} of scheduler {number}", value) for key, value in _of_scheduler(inner))


def _plain(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        kind = type(value)
        if key == "params" or key.startswith("_"):
            continue
        if issubclass(kind, _PLAIN):
            found.append((key, value))
        elif issubclass(kind, torch.Tensor) and value.numel() == 1 and not value.is_meta:
            found.append((key, value.item()))
        elif (items := items_of(value)) is not None:  # a dict: the Counter of a MultiStepLR
            numbers = [key if issubclass(kind, dict) else item for key, item in items]
            if all(issubclass(type(each), _NUMBERS) for each in numbers):
                found.append((key, numbers))
    return found


# --- what is in the program's code alone ---


def _of_code(component: Component) -> Iterator[tuple[str, Any]]:
    if isinstance(component, PlainComponent) and isinstance(component.target, LRScheduler):
        yield from _of_functions(component.target)


def _is_number(value: object) -> bool:
    return type(value) in _NUMBERS and abs(value) < _LARGEST  # type: ignore[arg-type]  # not NaN either


def _of_functions(scheduler: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    functions = getattr(scheduler, "lr_lambdas", ())
    for number, function in enumerate(functions):
        inner = function.func if isinstance(function, partial) else function
        of_group = f" of group {number}" if len(functions) > 1 else ""
        if isinstance(inner, MethodType):  # not called: it may count its calls
            owner, read = type(inner.__self__).__name__, attributes_of(inner.__self__).items()
            yield from ((f"{owner}.{name}{of_group}{where}", value) for name, value in read if _is_number(value))
        elif isinstance(inner, FunctionType):  # an object has its own state, which is in the scheduler's
            yield from ((f"factor at step {step}{of_group}{where}", _factor(function, step)) for step in _STEPS)
    for number, each in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _of_functions(each, f" of scheduler {number}")


def _factor(function: Any, step: int) -> float | None:
    """None: nothing that can be compared; a table may end, and a root may be of less than nothing."""
    try:
        value = function(step)
        number = float(value.item() if isinstance(value, torch.Tensor) else value)
    except Exception:
        return None
    return number if math.isfinite(number) else None


# --- what a data set goes through ---


def listing_of(parts: Mapping[str, Any]) -> Listing:
    """`parts`: the objects of a loader by their paths (``dataset``, ``dataset.dataset``, ``sampler``)."""
    found: dict[str, tuple[int, str]] = {}
    for path, owner in parts.items():
        for name, held in attributes_of(owner).items() if path.startswith(("dataset", "sampler")) else ():
            for number, values in enumerate(held if name == "tensors" and type(held) is tuple else (held,)):
                if len(found) < _MOST_LISTS and (type(values) in _LISTS or hasattr(type(values), "iloc")):
                    with suppress(Exception):  # of a library's table
                        if words := _words(values, name == "indices", length_of(owner)):
                            found[f"{path}.{name}" + f"[{number}]" * (values is not held)] = len(values), words
    return found


def difference(now: Listing, begun: Listing) -> str:
    """The difference in words; empty: none."""
    for path, ours in now.items():
        theirs = begun.get(path, ours)
        if ours[0] != theirs[0]:
            return f"{path} has {ours[0]} items and had {theirs[0]}"
        if ours != theirs:
            return f"{path} has other items, or has them in another order"
    return ""


def _words(values: Any, are_indices: bool, num_samples: int | None) -> str:
    """Empty: it is none of these lists."""
    if not getattr(values, "ndim", 1) or not (length := len(values)):
        return ""
    most, items = min(length, _MOST_ITEMS), getattr(values, "iloc", values)
    picked = [items[number * (length - 1) // max(1, most - 1)] for number in range(most)]
    if are_indices:
        return _digest([int(each) for each in picked])
    rows = [each if type(each) is tuple else (each,) for each in picked]
    if not all(row and issubclass(type(row[0]), (str, PurePath)) for row in rows):
        contents = [*map(_content, picked)] if length == num_samples else []
        return _digest(contents) if any(each is not None for each in contents) else ""
    names = [str(row[0]).partition("?")[0] for row in rows]  # without the signature of a URL
    folder = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071 - up to a slash
    return _digest(
        [
            (n.removeprefix(folder), *(each for each in row[1:] if type(each) in _LABELS))
            for n, row in zip(names, rows, strict=True)
        ]
    )


def _content(row: Any) -> object:
    """A row in memory, as far as it is plain; None: it is not."""
    if type(row) is dict:
        row = [*row.values()]
    if type(row) in (list, tuple) or hasattr(type(row), "iloc"):
        found = [_content(each) for each in [*row][:_MOST_PARTS]]
        return found if any(each is not None for each in found) else None
    if issubclass(type(row), (str, PurePath)):
        return PurePath(str(row).partition("?")[0]).name
    if type(row) is torch.Tensor:
        # A copy: numpy fixes the size of what it looks at.
        row = row.detach().flatten()[:_MOST_VALUES].to("cpu", torch.float64, copy=True).numpy()
    if issubclass(type(row), (np.ndarray, np.generic)):
        values = np.asarray(row).flat[:_MOST_VALUES]
        return None if values.dtype.hasobject else xxhash.xxh3_64_hexdigest(values.tobytes())
    return row if type(row) in _LABELS else None


def _digest(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(content).encode("utf-8", "surrogatepass"))
