"""Finds a `ModelAverager` of torch's that steps and is not named: in which steps it averages depends on its count."""

from __future__ import annotations

import ast
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch.distributed as dist

from mindx_elastic.capture.living import living_objects
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.rebound import paths_of
from mindx_elastic.guard.checks.source_reads import Sources
from mindx_elastic.guard.checks.surroundings import Found, program_files, variables_of
from mindx_elastic.guard.checks.syntax import walk
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Averagers"]

_MODULE = "torch.distributed.algorithms.model_averaging.averagers"
_LOOKS = 4


class Averagers:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged) -> None:
        self._unmanaged = unmanaged
        self._before: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._looks = 0

    def look(
        self, optimizers: Mapping[int, Found], named: Iterable[object], kept: Kept, frame: FrameType | None
    ) -> None:
        """At a boundary. `optimizers`: those of the program, by id. `named`: the guard's."""
        module = sys.modules.get(_MODULE)
        if module is None or self._looks >= _LOOKS or not (dist.is_available() and dist.is_initialized()):
            return  # to find them takes milliseconds, and they average over ranks
        self._looks += 1
        in_named = {id(attributes_of(optimizer).get("averager")) for optimizer in named}
        before, self._before = self._before, {}
        for averager in living_objects(module.ModelAverager):
            if id(averager) in kept.objects or id(averager) in in_named:
                continue
            step = averager.step
            self._before[id(averager)] = weakref.ref(averager), step
            reference, old = before.get(id(averager), (None, step))
            if reference is not None and reference() is averager and old != step:
                name = next((name for name, value in _variables(frame) if value is averager), "")
                if not _is_set(name, frame):
                    self._unmanaged.certain(*_words(averager, name, optimizers))


def _words(averager: Any, name: str, optimizers: Mapping[int, Found]) -> tuple[str, str]:
    kind = type(averager).__name__
    shown = f'averager "{name}" ({kind})' if name else f"a {kind}"
    what = f"{shown} counts its steps, which decide when it averages the weights, and is not named"
    owner = next((f for f in optimizers.values() if attributes_of(f.value).get("averager") is averager), None)
    if owner is not None:
        return what, f"Write Guard(optimizer={owner.name}, ...), in place of the optimizer inside"
    own = name or "averager"
    if "Periodic" in kind:
        return what, f'Write Guard(stateful={{"averager": {own}}}, ...)'
    return what, f"Write {own}.step = guard.step in front of {own}.average_parameters(...)"


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    for _, variables in variables_of(frame):
        for path, value in paths_of(variables):
            yield ".".join(path), value


def _is_set(name: str, frame: FrameType | None) -> bool:
    """Whether the program sets the count itself: ``averager.step = guard.step``."""
    own = f"{name.rpartition('.')[2]}.step"
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == "step"
        and ast.unparse(node).endswith(own)
        for tree, _ in Sources(program_files(frame)).trees()
        for node in walk(tree)
    )
