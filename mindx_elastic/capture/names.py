"""The names of the objects that a guard keeps, and of the parameters that optimizers update; the order in which a
checkpoint has these.

An optimizer's state, and that of a wrapper around one, is numbered: it says 3, and not ``model.fc.weight``. What 3 is
follows from the order of the program's lists, which may be another one at the next start (layers registered otherwise,
a list made from a set). So a file names the parameter of each number, and before a state is loaded the lists of the
live groups are put into the file's order, in place: every number then means what it meant, for an optimizer as for
what holds one inside. Groups in another order are refused: the program may set something by a group's number.

A parameter has the first of these names: its place in a named module; its name in ``stateful=``; the name that
``named_parameters()`` has given the optimizer; its place in the state of a named object (an agent with its network).
One without a name has its number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindx_elastic.capture.copying import tensors_in
from mindx_elastic.core.looks import attributes_of, items_of
from mindx_elastic.core.printable import listed
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.errors import MismatchError, UsageError

__all__ = [
    "Groups",
    "arrange_groups",
    "group_lists",
    "grouped",
    "name_targets",
    "names_in_groups",
    "optimizers_inside",
    "places_in_states",
]

Groups = list[dict[str, Any]]
"""``param_groups``."""
_DEEPEST, _MANY = 4, 4096
_PLAIN = frozenset((type(None), bool, int, float, str))
_SAME_OBJECTS = 'use the same objects as the run that wrote it, or start over with resume="never" in another directory'


def name_targets(
    *, model: Any, optimizer: Any, lr_scheduler: Any, scaler: Any, loader: Any, stateful: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One entry an object: ``model``, or ``model_0``, ``model_1`` for a list.

    Raises UsageError for a name given twice.
    """
    if stateful is not None and not isinstance(stateful, Mapping):
        raise UsageError(f"stateful={stateful!r}: give a dict of names and objects, for example {{'ema': ema}}")
    named: dict[str, Any] = {}
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "scaler": scaler, "loader": loader}
    for name, value in objects.items():
        if isinstance(value, (list, tuple)):
            named.update({f"{name}_{index}": one for index, one in enumerate(value)})
        elif value is not None:
            named[name] = value
    for name, value in (stateful or {}).items():
        key = f"stateful.{name}" if name in RESERVED_NAMES else name  # "rng" is what people call theirs
        if not isinstance(name, str) or key in named:
            raise UsageError(f"stateful[{name!r}]: that name is taken or not a string; choose another")
        named[key] = value
    return named


def names_in_groups(name: str, groups: Groups, names: Mapping[int, str]) -> list[list[str]]:
    """The names of the parameters of each group; one that `names` (by id) lacks is ``{name}.{number}``."""
    numbers = iter(range(sum(len(group["params"]) for group in groups)))
    return [[names.get(id(p), f"{name}.{n}") for p, n in zip(g["params"], numbers, strict=False)] for g in groups]


def grouped(names: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    """`names` as groups of `sizes`."""
    rest = iter(names)
    return [[name for _, name in zip(range(size), rest, strict=False)] for size in sizes]


def group_lists(target: object, others: Collection[int]) -> list[Groups]:
    """The lists of parameter groups in `target` and in what it holds, apart from `others` (by id)."""
    found: dict[int, Groups] = {}
    for each in _held(target, others):
        groups = attributes_of(each).get("param_groups")
        if isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups):
            found.setdefault(id(groups), groups)
    return list(found.values())


def optimizers_inside(target: object) -> list[torch.optim.Optimizer]:
    """Torch's optimizers in what `target` holds."""
    return [each for each in _held(target, ()) if issubclass(type(each), torch.optim.Optimizer) and each is not target]


def _held(target: object, others: Collection[int]) -> Iterator[Any]:
    """`target` and the objects with attributes in it, a few levels deep; runs no code of theirs."""
    level, seen = [target], set(others)
    for _ in range(_DEEPEST + 1):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _PLAIN or id(value) in seen or issubclass(kind, (nn.Module, torch.Tensor, type)):
                continue
            seen.add(id(value))
            if (items := items_of(value, _MANY)) is not None:
                below += [item for _, item in items]
            elif inside := attributes_of(value):
                yield value
                below += inside.values()
        level = below


def places_in_states(states: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The `parameters` whose memory the live `states` of objects share, by their places there."""
    wanted = {(p.data_ptr(), p.shape): p for p in parameters if p.numel()}
    found: dict[str, torch.Tensor] = {}
    for name, state in states.items():
        for place, tensor in tensors_in(state, name):
            if (parameter := wanted.get((tensor.data_ptr(), tensor.shape))) is not None:
                found[place] = parameter
    return found


def arrange_groups(
    where: str,
    groups: Groups,
    wanted: Sequence[Sequence[str]],
    parameters: Mapping[str, torch.Tensor],
    saved: Mapping[Any, Any] | None = None,
) -> list[str]:
    """Put the parameters of `groups` into the order of `wanted`, the names in the checkpoint. Returns what is to be
    said about it.

    parameters: by name, tied ones under each. saved: the state in the checkpoint by number, where that is known.
    Raises MismatchError where the parameters, or those of a group, are not the same.
    """
    own = [p for group in groups for p in group["params"]]
    named = set(map(id, parameters.values()))
    unnamed = iter([p for p in own if id(p) not in named])
    numbered = re.compile(rf"{re.escape(where)}\.\d+")
    found = [[parameters.get(n) if n in parameters else next(unnamed, None) if numbered.fullmatch(n) else None
              for n in names] for names in wanted]  # fmt: skip
    _check_same(where, own, wanted, found, parameters)
    there = [frozenset(map(id, group)) for group in found]
    here = [frozenset(map(id, group["params"])) for group in groups]
    if there != here:
        number = next(
            (n for n, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here))
        )
        sizes = [len(names) for names in wanted], [len(group["params"]) for group in groups]
        raise MismatchError(
            f"the checkpoint does not fit {where}: it has parameter groups of {sizes[0]} parameters, this optimizer "
            f"has {sizes[1]}, others or in another order; group {number} has "
            f"{listed([*[*wanted, []][number]], 3) or 'no parameters'} there. Give it the groups of the run that wrote "
            'it, in that order, or start over with resume="never" in another directory'
        )
    for group, mine in zip(groups, found, strict=True):
        group["params"][:] = mine
    return list(_by_number(where, wanted, found, parameters, saved))


def _check_same(
    where: str,
    own: Sequence[torch.Tensor],
    wanted: Sequence[Sequence[str]],
    found: Sequence[Sequence[torch.Tensor | None]],
    parameters: Mapping[str, torch.Tensor],
) -> None:
    live, there = set(map(id, own)), {id(p) for group in found for p in group}
    pairs = [pair for names, mine in zip(wanted, found, strict=True) for pair in zip(names, mine, strict=True)]
    gone = [name for name, p in pairs if p is None or id(p) not in live]
    names = {id(p): name for name, p in reversed([*parameters.items()])}
    new = [names.get(id(p), f"a parameter {list(p.shape)} of no named module") for p in own if id(p) not in there]
    if gone or new:
        told = [f"there it updates {listed(gone, 3)}, here not"] if gone else []
        told += [f"here it updates {listed(new, 3)}, there not"] if new else []
        raise MismatchError(f"the checkpoint does not fit {where}: {'; '.join(told)}; {_SAME_OBJECTS}")


def _by_number(
    where: str,
    wanted: Sequence[Sequence[str]],
    found: Sequence[Sequence[torch.Tensor | None]],
    parameters: Mapping[str, torch.Tensor],
    saved: Mapping[Any, Any] | None,
) -> Iterator[str]:
    """What is taken by its number only, and whose order nothing shows: shapes do where each is another one."""
    pairs = [pair for names, mine in zip(wanted, found, strict=True) for pair in zip(names, mine, strict=True)]
    loose = [(n, p) for n, (name, p) in enumerate(pairs) if name not in parameters and p is not None]
    if saved is not None:
        loose = [(n, p) for n, p in loose if saved.get(n)]
    shapes = [p.shape for _, p in loose]
    are_shown = len(set(shapes)) == len(shapes) and all(
        p.shape in {t.shape for _, t in tensors_in((saved or {}).get(n))} for n, p in loose
    )
    if len(loose) > 1 and not are_shown:
        yield (
            f"{where}: the state of {len(loose)} of its parameters goes back by their order, for they are in no named "
            "module: give the guard their module, model=[...], or the optimizer named_parameters()"
        )
