"""Finds what the training has and the guard does not keep: optimizers, parameters, schedulers, scalers, modules,
generators.

At entry, and at the looks after the fourth (see `Boundaries.is_look`), it looks through the program's variables (see
`program_variables`); what it has found is compared at each look from the first boundary on (see `movements`). That an
optimizer has stepped which it does not know is noted by the update gate's hook.

===============================================================  ==================================================
found                                                            certain when
===============================================================  ==================================================
a parameter of a named optimizer, in no named object             it is trained
an optimizer that steps and is not named                         its state is carried from one step into another
a scheduler of a named optimizer, not named                      it steps (one line at entry says so before)
a `GradScaler`, not named                                        it is enabled and has moved
a module, not named                                              its parameters change between two boundaries of an
                                                                 epoch; buffers, or between epochs: a risk
a generator                                                      it moves twice between boundaries of an epoch
a variable of a named tensor or container, bound again           a risk: it may be made new in each step
===============================================================  ==================================================

What an evaluation inside ``guard.outside_step()`` does counts nowhere.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from mindx_elastic.capture.components import OptimizerComponent
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.generators import Generators
from mindx_elastic.guard.checks.movements import TensorsLook, is_sharded_in_part
from mindx_elastic.guard.checks.named_state import NamedState
from mindx_elastic.guard.checks.program_variables import (
    Found,
    Seen,
    inner_schedulers,
    kind_of,
    look,
)
from mindx_elastic.guard.checks.rebound_state import ReboundState
from mindx_elastic.guard.checks.remedies import Remedies
from mindx_elastic.guard.checks.unnamed_optimizers import UnnamedOptimizers
from mindx_elastic.guard.opening import Opening

__all__ = ["FIRST_LOOKS", "Checks"]

FIRST_LOOKS = 4


@dataclass
class _Watched:
    """An object that is not kept, as it was at the last look."""

    reference: weakref.ref[Any]
    name: str
    remedy: str
    look: Any = None
    """None: it has not been looked at."""
    epoch: int = 0
    has_moved: bool = False


class Checks:
    """One per guard. Training thread."""

    def __init__(
        self,
        opening: Opening,
        *,
        loaders: Sequence[Any] = (),
        more: Mapping[str, object] | None = None,
        kept: Sequence[object] = (),
        own: Mapping[str, object] | None = None,
        epoch: Callable[[], int],
    ) -> None:
        """`loaders`: the named ones. `more`: objects to look into that no variable
        may have, `kept`: those whose state is kept all the same, but for that of `own`. `epoch`:
        gives the epoch of the last boundary."""
        unmanaged, targets = self._unmanaged, self._targets = opening.unmanaged, opening.targets
        self._collector, self._ddp, self._epoch = opening.collector, opening.ddp, epoch
        self._loaders, self._also_kept, self._own = tuple(loaders), tuple(kept), dict(own or {})
        self._roots = {**(more or {}), **targets}
        self._boundaries, self._evaluations = 0, 0
        self._is_on = False
        self._modules: dict[int, _Watched] = {}
        self._scalers: dict[int, _Watched] = {}
        self._schedulers: dict[int, _Watched] = {}
        self._strangers = UnnamedOptimizers(self._collector.optimizers())
        self._is_outside, self._is_stale = False, True
        self.has_news = False
        """`at_boundary` has something to do though it is not a look."""
        self._remedies, self._rebound = Remedies(targets, self._own, is_layered=bool(more)), ReboundState(unmanaged)
        self._generators = Generators(unmanaged, self._remedies)

    def watch(self, gate: UpdateGate) -> None:
        """Have `gate` tell which optimizers step. Main thread, at entry."""
        gate.expected = self._strangers.expected
        gate.at_stranger = self._note_stranger

    def _note_stranger(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_outside:
            self._strangers.note(optimizer)
            self.has_news = True

    # --- when ---

    def at_entry(self) -> None:
        """The state is back, the training begins: look from here on. Raises UnmanagedStateError."""
        self._is_on = True
        self._search(sys._getframe(1))

    def at_boundary(self, number: int, *, is_look: bool) -> None:
        """A boundary was passed, the process's `number`-th. Raises UnmanagedStateError."""
        if (refusal := self._unmanaged.refusal) is not None:
            raise refusal
        if not self._is_on:
            return  # an evaluation
        self._boundaries = number
        if self._strangers.waiting:
            self._check_strangers(sys._getframe(1))
        if self._schedulers:
            self._check_steps_of_schedulers()
        if number == 1:
            self._tell_of_join()
        if is_look:
            self._look_again(sys._getframe(1))
        self.has_news = bool(self._schedulers)

    def inside_window(self) -> None:
        """A step has ended, inside of an accumulation window. Raises UnmanagedStateError."""
        if self._is_on and self._strangers.waiting:
            self._check_strangers(sys._getframe(1))

    def hear_not_kept(self, names: Sequence[str]) -> None:
        """What goes on from step to step and is not kept: see `prove.not_kept`."""
        self._rebound.tell(names, sys._getframe(1))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around an evaluation: whatever moves inside is none of the training's."""
        if self._is_outside:
            yield
            return
        count = self._evaluations = self._evaluations + 1
        # A program may have such a block in every step: it is not to cost a look each time.
        closely = self._boundaries > 0 and (count <= FIRST_LOOKS or count & (count - 1) == 0)
        if closely:
            self._compare()
        self._is_outside = True
        try:
            yield
        finally:
            self._is_outside, self._is_stale = False, True
            if closely:
                self._compare()

    # --- looking ---

    def _kept(self) -> NamedState:
        return NamedState(self._targets, self._loaders, self._collector, self._also_kept, tuple(self._own.values()))

    def _search(self, frame: FrameType | None) -> None:
        """Look through the program's variables. Raises UnmanagedStateError."""
        kept = self._kept()
        loose = self._loose_parameters(kept)
        seen = look(frame, self._roots, map(id, (*(p for _, p in loose), *self._targets.values())))
        if self._boundaries == 0:
            self._rebound.at_entry(self._targets, seen)
        self._check_parameters(loose, seen)
        self._check_schedulers(seen, kept)
        self._watch_found(seen, kept)
        self._generators.watch(seen, kept)

    def _look_again(self, frame: FrameType | None) -> None:
        if self._collector.devices.is_used:
            self._collector.devices.wait_for_update()  # a look reads from them
        self._compare()
        if self._boundaries > FIRST_LOOKS or (self._own and self._boundaries == 1):  # callbacks begin after the guard
            self._search(frame)

    def _optimizer_ids(self) -> set[int]:
        components = self._collector.components
        own = {id(t) for t in self._targets.values() if isinstance(t, torch.optim.Optimizer)}
        own |= {id(o) for c in components.values() if isinstance(c, OptimizerComponent) for o in (c.optimizer, c.local)}
        return own | self._strangers.covered_ids()

    # --- parameters ---

    def _loose_parameters(self, kept: NamedState) -> list[tuple[str, torch.Tensor]]:
        """The trained parameters of the named optimizers that no named object keeps, and their optimizer's name."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, component in self._collector.components.items():
            for group in component.optimizer.param_groups if isinstance(component, OptimizerComponent) else ():
                for parameter in group["params"]:
                    if parameter.requires_grad and not kept.has(parameter):
                        found.setdefault(id(parameter), (name, parameter))
        return list(found.values())

    def _check_parameters(self, loose: Sequence[tuple[str, torch.Tensor]], seen: Seen) -> None:
        if not loose:
            return
        owners: dict[int, Found] = {}
        names: list[str] = []
        variables: list[Found] = []
        for _, parameter in loose:
            owner, place = _owner_of(parameter, seen)
            if owner is not None:
                owners.setdefault(id(owner.value), owner)
                names.append(f'"{owner.name}.{place}"')
            elif id(parameter) in seen.asked:
                variables.append(seen.asked[id(parameter)][0])
                names.append(str(variables[-1]))
            else:
                names.append(f"one of shape {list(parameter.shape)}")
        optimizer = loose[0][0]
        count = "1 parameter" if len(loose) == 1 else f"{len(loose)} parameters"
        what = f'optimizer "{optimizer}" trains {count} that none of the guard\'s objects holds: {listed(names, 3)}'
        if owners:
            remedy = self._remedies.argument_line("model", [found.name for found in owners.values()])
        elif variables:
            content = ", ".join(
                f'"{self._remedies.key(v.name)}": torch.nn.ParameterList([{v.name}])' for v in variables[:3]
            )
            remedy = self._remedies.line(content)
        else:
            remedy = "Give the guard the module that has them (model=[...]), or name them in stateful="
        self._unmanaged.certain(what, remedy)

    # --- optimizers ---

    def _check_strangers(self, frame: FrameType | None) -> None:
        owners = [*self._collector.optimizers(), *(t for t in self._targets.values() if kind_of(type(t)) == "instance")]
        for optimizer in self._strangers.at_boundary(owners):
            seen = look(frame, self._roots)
            found = seen.of["optimizer"].get(id(optimizer))
            number = sum(len(group["params"]) for group in optimizer.param_groups)
            shown = str(found) if found is not None else f"of {number} parameters ({type(optimizer).__name__})"
            what = f"optimizer {shown} steps and is not named"
            remedy = self._remedies.argument_line("optimizer", ["" if found is None else found.name])
            self._unmanaged.certain(what, remedy)

    # --- schedulers ---

    def _check_schedulers(self, seen: Seen, kept: NamedState) -> None:
        ours = self._optimizer_ids()
        children = {key for found in seen.of["scheduler"].values() for key in inner_schedulers(found.value)}
        for key, found in seen.of["scheduler"].items():
            optimizer = attributes_of(found.value).get("optimizer")
            if id(optimizer) not in ours or kept.has_object(found.value) or key in children:
                continue
            if key in self._schedulers:
                continue
            # It may be unused, or left over from an earlier training: it is refused when it steps.
            steps, remedy = _steps_of(found.value), self._remedies.argument_line("lr_scheduler", [found.name])
            watched = self._schedulers[key] = _Watched(weakref.ref(found.value), str(found), remedy, steps)
            if steps <= 1:
                what = f"scheduler {watched.name} belongs to an optimizer of the guard and is not named"
                self._unmanaged.hint(f"{what}: its first step will be refused", remedy)

    def _check_steps_of_schedulers(self) -> None:
        for watched, scheduler in _alive(self._schedulers):
            if _steps_of(scheduler) != watched.look:
                watched.look = _steps_of(scheduler)
                what = f"scheduler {watched.name} belongs to an optimizer of the guard, steps and is not named"
                self._unmanaged.certain(what, watched.remedy)

    # --- DDP ---

    def _tell_of_join(self) -> None:
        for name, module in self._ddp:
            config = getattr(module, "_join_config", None)
            if getattr(config, "enable", False) and not getattr(config, "throw_on_early_termination", False):
                logger.info(
                    "%s is trained inside join(): ranks that make different numbers of steps have no boundary in "
                    "common to stop at. Give each as many batches (a DistributedSampler over the whole data set)",
                    name,
                )

    # --- what moves ---

    def _watch_found(self, seen: Seen, kept: NamedState) -> None:
        """Begin to watch what has been found and is not kept. The next comparison is the first look at it."""
        claimed: set[int] = set()
        for key, found in _outermost(seen.of["module"], kept):
            missing = {id(tensor) for each in kept.missing(found.value) for tensor in each}
            if key not in self._modules and missing - claimed and not is_sharded_in_part(found.value):
                remedy = self._remedies.stateful_line([found.name])
                self._modules[key] = _Watched(weakref.ref(found.value), str(found), remedy)
            claimed |= missing
        for key, found in seen.of["scaler"].items():
            if key not in self._scalers and not kept.has_object(found.value):
                remedy = f"Write Guard(scaler={found.name}, ...)"
                self._scalers[key] = _Watched(weakref.ref(found.value), str(found), remedy)

    def _compare(self) -> None:
        """Compare what is watched with the look before, unless an evaluation came between. Raises
        UnmanagedStateError."""
        tells, self._is_stale = not self._is_stale, False
        for watched, scaler in _alive(self._scalers) if self._scalers else ():
            before, watched.look = watched.look, _scale_of(scaler)
            if tells and watched.look != before and None not in (before, watched.look):
                self._unmanaged.certain(f"scaler {watched.name} is used and not named", watched.remedy)
        if self._generators.watched:
            self._generators.compare(self._epoch(), tells=tells)
        if self._modules:
            self._compare_modules(tells=tells)

    def _compare_modules(self, *, tells: bool) -> None:
        kept = self._kept()
        for watched, module in _alive(self._modules):
            if is_sharded_in_part(module):
                continue
            before, epoch = watched.look, watched.epoch
            watched.look, watched.epoch = tuple(map(TensorsLook.at, kept.missing(module))), self._epoch()
            if before is None or not tells:
                continue
            trained, other = (old.has_moved(new) for old, new in zip(before, watched.look, strict=True))
            if trained and epoch == watched.epoch:
                watched.has_moved = True
                self._unmanaged.certain(
                    f"module {watched.name} changes in the training and is not named", watched.remedy
                )
            elif watched.has_moved:
                continue  # said before, and worse
            elif trained:
                self._unmanaged.risk(f"module {watched.name} changes between epochs and is not named", watched.remedy)
            elif other:
                self._unmanaged.risk(
                    f"buffers of module {watched.name}, which is not named, change in the training",
                    f"{watched.remedy}, or call eval() on it if it is only evaluated",
                )


def _alive(watched: dict[int, _Watched]) -> Iterator[tuple[_Watched, Any]]:
    """The objects that still exist; the others are forgotten."""
    for key, one in list(watched.items()):
        value = one.reference()
        if value is None:
            del watched[key]
        else:
            yield one, value


def _owner_of(parameter: torch.Tensor, seen: Seen) -> tuple[Found | None, str]:
    """The module among the variables that has `parameter`, and its name there."""
    for found in seen.of["module"].values():
        for place, own in found.value.named_parameters():
            if own is parameter:
                return found, place
    return None, ""


def _steps_of(scheduler: object) -> int:
    attributes = attributes_of(scheduler)
    number = attributes.get("_step_count", attributes.get("last_epoch", 0))
    return number if isinstance(number, int) else 0


def _scale_of(scaler: Any) -> tuple[float, int] | None:
    """How a GradScaler stands; None while it is unused or switched off."""
    attributes = attributes_of(scaler)
    scale, tracker = attributes.get("_scale"), attributes.get("_growth_tracker")
    if not attributes.get("_enabled") or not torch.is_tensor(scale) or not torch.is_tensor(tracker):
        return None
    return float(scale.item()), int(tracker.item())


def _outermost(modules: Mapping[int, Found], kept: NamedState) -> Sequence[tuple[int, Found]]:
    """The modules that are not kept, those that contain others in front."""
    own = [(key, found) for key, found in modules.items() if not kept.has_object(found.value)]
    return sorted(own, key=lambda item: -sum(1 for _ in item[1].value.modules()))
