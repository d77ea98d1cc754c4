"""Tells which settings of optimizers and schedulers the program gives otherwise than the run that it resumes.

A checkpoint has the learning rate, the length of a schedule and the like, and a start goes on with them: else it would
be another training. Whoever has changed ``--lr`` or ``--epochs`` on the command line is to hear that.

What moves in a training (``lr``, ``last_epoch``, a momentum that is cycled) says nothing, so what stays is compared. Of
a learning rate without a scheduler no one can tell whether the program has moved it by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from mindx_elastic.capture.components import Component, PlainComponent
from mindx_elastic.capture.optimizer_component import OptimizerComponent

__all__ = ["find_changed_settings"]

_OF_A_GROUP = ("initial_lr", "eps", "amsgrad", "nesterov", "dampening")
_OF_A_SCHEDULER = (
    "base_lrs", "T_max", "T_0", "T_mult", "eta_min", "step_size", "milestones", "gamma", "total_steps", "total_iters",
    "start_factor", "end_factor", "factor", "power", "step_size_up", "step_size_down",
)  # fmt: skip
_MOST = 4


def find_changed_settings(components: Mapping[str, Component], state: Mapping[str, Any]) -> list[str]:
    """Before `state` is loaded. A line for each object."""
    found = []
    for name, component in components.items():
        changed = [
            f"{key} is {ours} in the program and {theirs} in it" for key, ours, theirs in _of(component, state[name])
        ]
        if changed:
            more = f" (and {len(changed) - _MOST} more)" if len(changed) > _MOST else ""
            found.append(
                f"{name} goes on with the settings of the checkpoint: {'; '.join(changed[:_MOST])}{more}. To change "
                'them, set them inside of the guard\'s block, or start anew with resume="never" in another directory'
            )
    return found


def _of(component: Component, saved: Any) -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(saved, Mapping):
        return
    if isinstance(component, OptimizerComponent):
        groups = zip(component.local.param_groups, saved.get("param_groups", ()), strict=False)
        for number, (ours, theirs) in enumerate(groups):
            where = f" of group {number}" if len(component.local.param_groups) > 1 else ""
            for key in _OF_A_GROUP:
                if key in ours and key in theirs and _differ(ours[key], theirs[key]):
                    yield key + where, ours[key], theirs[key]
    elif isinstance(component, PlainComponent) and isinstance(component.target, LRScheduler):
        ours = vars(component.target)
        for key in _OF_A_SCHEDULER:
            if key in ours and key in saved and _differ(ours[key], saved[key]):
                yield key, _plain(ours[key]), _plain(saved[key])


def _differ(ours: Any, theirs: Any) -> bool:
    ours, theirs = _plain(ours), _plain(theirs)
    return type(ours) in _PLAIN and type(theirs) in _PLAIN and ours != theirs


_PLAIN = (bool, int, float, list)


def _plain(value: Any) -> Any:
    """A list of numbers for a tuple, or for the ``Counter`` of a `MultiStepLR`."""
    if isinstance(value, Mapping):
        return sorted(map(str, value))
    return list(value) if isinstance(value, (list, tuple)) else value
