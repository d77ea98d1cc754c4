"""Names what goes on from step to step and is in no checkpoint: facts of a run, without a verdict.

Variables of the running functions, and of generators over a loader, count when the compiler's own dataflow says that
the next iteration may read them (`loop_variables`). Containers, tensors and attributes of the program's objects, and
attributes of named modules, count when they differ between the process's first and fifth boundary; so do gradients to
which each step adds. What the first step alone sets is found by a look at the guard's entry, what changes later, as the
best loss of an early stop does at an epoch's end, by later ones. Left out is what each iteration binds again, and what
the guard keeps; what the states of other named objects leave out is shown by a comparison only. Whether any of it
matters is shown by the next resume, which compares its first step (`overlap`).
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, GeneratorType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn

from mindx_elastic.capture.adapters import Attributes
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent
from mindx_elastic.capture.dtensors import local_part
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.program_variables import (
    is_library,
    kind_of,
    locals_of,
    program_frames,
    reachable,
    variables_of,
)
from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from mindx_elastic.prove.compare import root_of, short_of
from mindx_elastic.prove.digests import digest
from mindx_elastic.prove.loop_variables import carried, loops_around
from mindx_elastic.prove.variables import KEPT, Variables, draws_from, is_clock
from mindx_elastic.prove.witness import kept_of

__all__ = ["FIRST_LOOK", "SECOND_LOOK", "NotKept", "counts_from_the_start", "has_begun_again"]

FIRST_LOOK, SECOND_LOOK = 1, 5
"""The boundaries that are compared first: what is only made in the first step has changed before."""
_MOST_OF_ONE = 3
"""An object with more attributes is named as a whole."""
_VALUES = (bool, int, float, complex, str, bytes, np.generic)
_WITH_OWN_PARTS = (nn.Module, torch.optim.Optimizer)
_DATA = (torch.Tensor, np.ndarray, list, tuple, dict)


class NotKept:
    """One per entered guard. Training thread; runs no code of the program."""

    def __init__(self, targets: Mapping[str, Any], collector: Collector) -> None:
        kept, self._ids = kept_of(targets)
        self._kept = kept.values()
        ours = [target for target in targets.values() if type(target).__module__.startswith("mindx_elastic.")]
        held = [value for each in ours for value in attributes_of(each).values()]
        held = [value for value in held if kind_of(type(value)) in ("loader", "instance")]
        self._sources = {*map(id, targets.values()), *map(id, held)}
        """Loaders, and those that adapters follow: where what draws from them stands is kept."""
        modules = [(n, c) for n, c in collector.components.items() if isinstance(c, ModuleComponent)]
        self._partly = {name: targets[name] for name, component in modules if not component.keeps_attributes}
        """Modules whose own attributes are in no state, but for those that `attributes` names."""
        self._targets = targets
        self._given: set[tuple[int, str]] = set()
        """The `id` of objects and the names of their attributes that are kept."""
        self._data: set[int] = set()
        """The `id` of containers, tensors and arrays among these."""
        self._cycles: dict[str, None] = {}
        """Names of `itertools.cycle` over a loader: it keeps the batches of an epoch, and no loader after that."""
        self.num_looks = 0
        self._collector = collector
        self._gradients = _CarriedGradients(collector)
        self._before: dict[str, str] = {}
        """Variables as at the guard's entry, then as at the first look."""
        self._objects: dict[str, int] = {}
        """The `id` of what the program's names stand for at the guard's entry."""
        with suppress(Exception):  # no look ends a program
            frames = list(program_frames(sys._getframe(1)))
            self._before, self._objects = self._look(frames), _objects(frames)
        self._in_steps: list[str] = []
        self._later: list[str] = []

    @property
    def in_steps(self) -> list[str]:
        """Names of what goes on from step to step, once the second look has found them."""
        return _shortened(self._in_steps)

    @property
    def later(self) -> list[str]:
        """Names of what has changed since in some steps or between them."""
        return _shortened(self._later)

    def look(self, is_ahead: Callable[[], bool]) -> Sequence[str]:
        """Called at the process's boundary `FIRST_LOOK`, then at `SECOND_LOOK`, then at any time. Returns the names
        that are new. `is_ahead`: whether the program has fetched batches of named loaders for later steps; they are
        fetched again by a resumed run."""
        self.num_looks += 1
        try:
            frames = list(program_frames(sys._getframe(1)))
            while len(frames) > 1 and not loops_around(frames[0]):  # called by an iteration: its variables end with it
                frames.pop(0)
            ahead, after = is_ahead(), self._look(frames)
            if self.num_looks == 1:
                self._later = self._named(self._made_first(frames, after), frames, after, ahead)
                self._before = after
                self._gradients.watch()
                return ()
            changed = [key for key, value in after.items() if self._before.get(key, value) != value]
            changed = self._named(changed, frames, after, ahead)
            if self.num_looks > 2:
                new = [name for name in changed if name not in {*self._in_steps, *self._later}]
                self._later += new
                return _shortened(new)
            self._in_steps = list(dict.fromkeys([*self._carried(frames, ahead), *changed, *self._gradients.found()]))
            self._later = [name for name in self._later if name not in self._in_steps]
            return self.in_steps
        except Exception as error:  # no look ends a program
            logger.debug("the look for what is not kept has failed: %s: %s", type(error).__name__, error)
            return ()

    def _look(self, frames: Sequence[FrameType]) -> dict[str, str]:
        given = list(self._kept_attributes())
        self._given = {(id(owner), name) for owner, name in given}
        values = [attributes_of(owner).get(name) for owner, name in given]
        self._data = {id(value) for value in values if isinstance(value, _DATA)}
        for each in frames:
            cycles = [(n, value) for n, value in locals_of(each).items() if type(value) is itertools.cycle]
            self._cycles.update((name, None) for name, value in cycles if draws_from(value, self._sources))
        found = self._variables(frames, self._ids)
        return found | Variables((), quick=True, but=self._given).of_kept(self._partly)

    def _kept_attributes(self) -> Iterator[tuple[object, str]]:
        for each in self._targets.values():
            if isinstance(each, Attributes):
                yield from ((each.target, name) for name in each.names)
            elif isinstance(each, FollowedLoader) and each.settings is not None:
                yield from each.settings.kept()

    def _variables(self, frames: Sequence[FrameType], but: Collection[int]) -> dict[str, str]:
        frame = frames[0] if frames else None
        kept = self._data.union(but)
        look = Variables(kept, positions=True, quick=True, parameters=True, sources=self._sources, but=self._given)
        return look.of_program(frame)

    def _carried(self, frames: Sequence[FrameType], is_ahead: bool) -> list[str]:
        found = [name for each in frames for name in self._carried_by(each, carried(each), is_ahead)]
        found += self._cycles
        for each in self._generators_over_loaders(frames):
            # A resumed run begins the generator again: what its outer loops count begins, too.
            counts = {name for loop in loops_around(each)[:-1] for name in loop.targets if name != "_"}
            names = self._carried_by(each, carried(each), is_ahead) + self._carried_by(each, counts, is_ahead)
            found += [f"{name} of {each.f_code.co_name}()" for name in names]
        return found

    def _generators_over_loaders(self, frames: Sequence[FrameType]) -> Iterator[FrameType]:
        """Where the program's generators stand that hand on the batches of a loader; the others are named themselves.
        `frames` have them in variables."""
        for frame in frames:
            for value in locals_of(frame).values():
                inner = value.gi_frame if type(value) is GeneratorType else None
                if inner is None or is_library(str(inner.f_globals.get("__name__"))):
                    continue
                if draws_from(value, self._sources):
                    yield inner

    def _carried_by(self, frame: FrameType, names: Collection[str], is_ahead: bool) -> list[str]:
        """Those of `names`, variables of `frame`, that have something for the next step."""
        found: list[str] = []
        variables, kept = locals_of(frame) if names else {}, self._ids | self._data
        for name in sorted(names):
            if name not in variables or id(value := variables[name]) in kept:
                continue
            if type(value) is float and is_clock(value):
                continue
            is_data, is_value = isinstance(value, _DATA), isinstance(value, (*_VALUES, type(None)))
            is_object = kind_of(type(value)) == "instance" and not hasattr(type(value), "__next__")
            if is_value or is_object or (is_data and not is_ahead):
                found.append(name)
        return found

    def _made_first(self, frames: Sequence[FrameType], after: Mapping[str, str]) -> list[str]:
        """Globals that have changed since the guard was entered, and what has changed or is new on an object that was
        there. In another function that may have another place. Of a function's own variables the loop tells which go
        on."""
        before, now = {_without_place(key): value for key, value in self._before.items()}, _objects(frames)
        found = []
        for key, value in after.items():
            root = root_of(key)
            if short_of(key) == root:
                is_new = "() in " not in key and self._before.get(key, value) != value
            else:
                is_same_object = root in now and self._objects.get(root) == now[root]
                is_new = is_same_object and before.get(_without_place(key)) != value
            if is_new:
                found.append(key)
        return found

    def _named(
        self, changed: Sequence[str], frames: Sequence[FrameType], after: Mapping[str, str], is_ahead: bool
    ) -> list[str]:
        """The names of those that the loop does not bind and the guard does not keep."""
        loops = [loops_around(each) for each in frames] if changed else []
        # What they bind is named by `_carried`, or new in each step or epoch.
        in_step = {name for around in loops for loop in around[-1:] for name in loop.bound}
        in_loops = {name for around in loops for loop in around for name in loop.bound}
        of_kept, others = list[str](), list[str]()
        for key in changed:
            name, root = short_of(key), root_of(key)
            if key.endswith(f"({KEPT})"):
                of_kept.append(name)
            elif is_ahead and " " in after[key]:  # a tensor
                continue
            elif root not in (in_loops if key.startswith(f'"{root}" ') else in_step):
                others.append(key)
        if others:
            inside = [reachable(each, models=False) for each in self._kept if not isinstance(each, _WITH_OWN_PARTS)]
            left = self._variables(frames, self._ids.union(*inside))
            others = [short_of(key) for key in others if key in left]
        return list(dict.fromkeys([name.partition("[")[0] for name in [*others, *of_kept]]))


def _objects(frames: Sequence[FrameType]) -> dict[str, int]:
    found: dict[str, int] = {}
    for _, variables in variables_of(frames[0] if frames else None):
        found = {**{name: id(value) for name, value in variables.items()}, **found}
    return found


def _without_place(key: str) -> str:
    return key.rpartition(" (")[0]


def counts_from_the_start() -> list[str]:
    """In the first step of a process, in the middle of an epoch: what the program's innermost loop binds and counts
    from 0 or 1, as `enumerate(loader)` does."""
    for frame in program_frames(sys._getframe(1)):
        if around := loops_around(frame):
            variables = locals_of(frame)
            values = [(name, variables.get(name)) for name in sorted(around[-1].targets)]
            return [name for name, value in values if type(value) is int and value in (0, 1)]
    return []


def has_begun_again(names: Collection[str]) -> bool:
    """In the first step of a process, in the middle of an epoch: whether one of `names`, which went on from step to
    step in the stopped one, is 0 or 1: a loop that counts by itself makes all of its steps once more."""
    begun = digest(0), digest(1)
    return any(v in begun and short_of(k) in names for k, v in Variables(()).of_program(sys._getframe(1)).items())


def _shortened(names: Sequence[str]) -> list[str]:
    owners = Counter(name.rpartition(".")[0] for name in names)
    many = {owner: f"{owner} ({count} attributes)" for owner, count in owners.items() if owner and count > _MOST_OF_ONE}
    return list(dict.fromkeys(many.get(name.rpartition(".")[0], name) for name in names))


class _CarriedGradients:
    """Finds gradients that go on from step to step: a backward adds to what an earlier step has left in them.

    No checkpoint has the gradients of a boundary. A program that clears them only after its update, and then has
    another backward (of the generator, through the discriminator), or clears them in no step, trains on with other
    ones. One per entered guard. Training thread, but for the hooks, which run in autograd's threads.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._handles: dict[str, tuple[Any, Any]] = {}
        self._before: dict[str, torch.Tensor | None] = {}
        """Whether a gradient had anything in it when it was computed next. Read later: that waits for a device."""
        self._added: list[str] = []

    def watch(self) -> None:
        """At a boundary: look at the next backward that adds to a gradient which is there now."""
        places = self._collector.places()
        for parameter in self._collector.parameters:
            place = places.get(id(parameter))
            if place is not None and parameter.grad is not None and parameter.requires_grad:
                # By a reference that keeps nothing: parameters and gradients are the program's to free. A hook before
                # is called by autograd.grad() as well, which adds to nothing.
                before = parameter.register_hook(partial(self._note, place, ref(parameter)))
                added = parameter.register_post_accumulate_grad_hook(partial(self._note_added, place))
                self._handles[place] = before, added

    def _note(self, place: str, parameter: ref[torch.Tensor], _computed: torch.Tensor) -> None:
        gradient: torch.Tensor | None = getattr(parameter(), "grad", None)
        self._before[place] = None
        if gradient is not None and gradient.layout is torch.strided:
            self._before[place] = local_part(gradient).any()

    def _note_added(self, place: str, _parameter: torch.Tensor) -> None:
        self._added.append(place)
        self._unhook(place)

    def _unhook(self, place: str) -> None:
        for handle in self._handles.pop(place, ()):
            handle.remove()

    def found(self) -> list[str]:
        """What has been seen since `watch`, which ends here, as one text or none."""
        for place in list(self._handles):
            self._unhook(place)
        before = {place: self._before.get(place) for place in self._added}
        carried = [place for place, something in before.items() if something is not None and bool(something)]
        what = f"gradients of {listed(carried, 1)}" if carried else ""
        return [f"{what} (the next step adds to them: call zero_grad() before backward())"] if what else []
