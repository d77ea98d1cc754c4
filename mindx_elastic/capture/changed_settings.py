"""Tells which settings of optimizers, schedulers and scalers the program gives otherwise than the run that it resumes.

A checkpoint has the learning rate, the length of a schedule and the like, and a start goes on with them: else it would
be another training. Whoever has changed ``--lr`` or ``--epochs`` on the command line is to hear that.

What stands in these objects moves in a training (by a scheduler or by hand), so it is not what is compared. Each file
has what the program had given when the training began (`settings_given`), which the same command gives again.

What no checkpoint brings back (a dropout's `p`, the function of a `LambdaLR`) is compared likewise in `code_settings`,
and told with the opposite consequence: the program's counts from here on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from mindx_elastic.capture.code_settings import changed_in_code, settings_in_code
from mindx_elastic.capture.components import Component, PlainComponent
from mindx_elastic.capture.optimizer_component import OptimizerComponent
from mindx_elastic.core.looks import asked, items_of

__all__ = ["GivenSettings"]

_MOST = 4
_NUMBERS = (bool, int, float)
_PLAIN = (*_NUMBERS, str, type(None))
_IN_CODE, _SEED = "", "torch's seed"
"""No objects' names: in the file, what is in the program's code and not in its objects' state; there, torch's seed."""


class GivenSettings:
    """What the program has given, by object and setting. Training thread.

    Only of torch's own kinds of objects: what an object of the program's own class begins with may be a time or drawn.
    """

    def __init__(self, components: Mapping[str, Component]) -> None:
        """Before anything is loaded into the objects."""
        found = {name: dict(_of(each)) for name, each in components.items() if _is_new(each)}
        self.of_training: Mapping[str, Mapping[str, Any]] = {name: given for name, given in found.items() if given}
        """When the training began."""
        self._now = dict(self.of_training)
        self._in_code = settings_in_code(components) if all(map(_is_new, components.values())) else {}
        self._seed = self._seed_of_training = str(torch.initial_seed())
        self.kept = self._for_file()
        """For the file; only ever replaced."""

    def _for_file(self) -> Mapping[str, Any]:
        return {**self.of_training, _IN_CODE: {**self._in_code, _SEED: self._seed_of_training}}

    def forget(self, name: str) -> None:
        """The groups of optimizer `name` have other numbers from here on: what was given is not compared."""
        self._now.pop(name, None)

    def resume(self, state: Mapping[str, Any], components: Mapping[str, Component], *, live: bool) -> list[str]:
        """The training that `state` is of goes on, which is loaded into `components`. Returns a line for each object
        whose settings that has changed, none if `live`: the objects have run in this process, and moved."""
        theirs = state.get("settings_given")
        if not isinstance(theirs, Mapping):  # converted, or of an older version: from here on this start's count
            return []
        self.of_training = {name: given for name, given in theirs.items() if name != _IN_CODE}
        begun, now = theirs.get(_IN_CODE, {}), self._in_code
        self._in_code = now if now and not live else begun
        if isinstance(begun, Mapping) and isinstance(seed := begun.get(_SEED), str):
            self._seed_of_training = seed
        self.kept = self._for_file()
        if live:
            return []
        told = [*self._changed(components), *changed_in_code(now, begun)]
        if self._seed != self._seed_of_training:
            told.append(
                f"random numbers go on as in the checkpoint: torch's seed is {self._seed} in the program and "
                f"{self._seed_of_training} in it. Another seed counts in a new run only: start anew with "
                'resume="never" in another directory'
            )
        return told

    def _changed(self, components: Mapping[str, Component]) -> Iterator[str]:
        for name, given in self._now.items():
            begun = self.of_training.get(name, {})
            loaded = {**begun, **dict(_of(components[name]))}
            changed = [
                f"{key} is {value} in the program and {loaded[key]} in it"
                for key, value in given.items()
                if key in begun and value not in (begun[key], loaded[key])
            ]
            if changed:
                more = f" (and {len(changed) - _MOST} more)" if len(changed) > _MOST else ""
                yield (
                    f"{name} goes on with the settings of the checkpoint: {'; '.join(changed[:_MOST])}{more}. To "
                    'change them, set them inside of the guard\'s block, or start anew with resume="never" in another '
                    "directory"
                )


def _is_new(component: Component) -> bool:
    """Whether it stands as the program has made it: not where an earlier block of the process has trained with it."""
    if isinstance(component, OptimizerComponent):
        return not component.local.state
    scheduler = getattr(component, "target", None)
    return not isinstance(scheduler, LRScheduler) or not _has_moved(scheduler)


def _has_moved(scheduler: Any) -> bool:
    return asked(scheduler, "last_epoch", 0) > 0 or any(map(_has_moved, asked(scheduler, "_schedulers", ())))


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
