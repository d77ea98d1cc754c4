"""Finds what the training has and the guard does not keep: optimizers, parameters, schedulers, modules, generators.

At entry, and at the boundaries 1, 8, 16, 32, ... of the process, it looks through the program's variables (see
`surroundings`); there and at 2, 3 and 4 it compares what it has found with the look before (see `movements`). At every
boundary it asks only whether an optimizer has stepped that it does not know, which the update gate's hook notes.

===============================================================  ==================================================
found                                                            certain when
===============================================================  ==================================================
a parameter of a named optimizer, in no named object             it is trained
an optimizer that steps and is not named                         its state is carried from one step into another
a scheduler of a named optimizer, not named                      it steps (one line at entry says so before)
a `GradScaler`, not named                                        it is enabled and has moved
a module, not named                                              its parameters change between two boundaries of an
                                                                 epoch; buffers, or between epochs: a risk
a generator                                                      it moves twice between boundaries; in an evaluation
                                                                 between epochs: a risk
a named tensor, container or module whose variable holds         a risk: it may be made anew in each step
another one, which changes
weights of a `WeightedRandomSampler` that change in an epoch     a risk
===============================================================  ==================================================

What an evaluation inside ``guard.outside_step()`` does counts nowhere.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import OptimizerComponent
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.cudnn_dropout import tell_of_cudnn_dropout
from mindx_elastic.guard.checks.generators import Generators
from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.movements import (
    Movement,
    NumbersLook,
    TensorsLook,
    is_sharded_in_part,
)
from mindx_elastic.guard.checks.rebound import ReboundState
from mindx_elastic.guard.checks.refreshed import RefreshedModules
from mindx_elastic.guard.checks.remedies import Remedies
from mindx_elastic.guard.checks.samplers import WeightsOfSamplers
from mindx_elastic.guard.checks.strangers import Strangers
from mindx_elastic.guard.checks.surroundings import (
    Found,
    Seen,
    find_bound,
    inner_schedulers,
    kind_of,
    look,
    places_of,
    reachable,
)
from mindx_elastic.guard.replicas import DdpModules
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Checks"]

_FIRST_LOOKS = 4
_ORDER_COUNTS = 3


@dataclass
class _Watched:
    """An object that is not kept, as it was at the last look."""

    reference: Callable[[], Any]
    name: str
    look: Any
    epoch: int
    moves: int = 0
    remedy: str = ""


@dataclass
class _Watch:
    modules: dict[int, _Watched] = field(default_factory=dict)
    scalers: dict[int, _Watched] = field(default_factory=dict)
    scheduler_likes: dict[int, _Watched] = field(default_factory=dict)
    schedulers: dict[int, _Watched] = field(default_factory=dict)


class Checks:
    """One per guard. Training thread."""

    def __init__(
        self,
        unmanaged: Unmanaged,
        targets: Mapping[str, Any],
        collector: Collector,
        *,
        loaders: Sequence[Any] = (),
        ddp: DdpModules = (),
        more: Mapping[str, object] | None = None,
        kept: Sequence[object] = (),
        own: Mapping[str, object] | None = None,
        uneven: str = "",
        epoch: Callable[[], int],
    ) -> None:
        """`loaders`: the named ones. `ddp`: the known DDP modules. `more`: objects to look into that no variable
        may have, `kept`: those whose state is kept all the same, but for that of `own`. `uneven`: see `Start.uneven`.
        `epoch`: gives the epoch of the last boundary."""
        self._unmanaged, self._targets, self._collector, self._epoch = unmanaged, targets, collector, epoch
        self._loaders, self._ddp, self._also_kept, self._own = tuple(loaders), ddp, tuple(kept), dict(own or {})
        self._roots = {**(more or {}), **targets}
        self._boundaries, self._next = 0, 1
        self._is_on, self._uneven = False, uneven
        self._watch, self._gate, self._weights_of_samplers = _Watch(), UpdateGate(), WeightsOfSamplers()
        self._strangers = Strangers(self._collector.optimizers())
        self._is_outside, self._is_stale, self._evaluations = False, False, 0
        self._has_told_of_size = False
        self.refreshed = RefreshedModules()
        self._remedies, self._rebound = Remedies(targets, self._own), ReboundState(unmanaged)
        self._generators = Generators(unmanaged, self._remedies)

    def watch(self, gate: UpdateGate) -> None:
        """Have `gate` tell which optimizers step. Main thread, at entry."""
        self._gate = gate
        gate.expected = self._strangers.expected
        gate.at_stranger = self._note_stranger

    def _note_stranger(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_outside:
            self._strangers.note(optimizer)

    # --- when ---

    def at_entry(self) -> Seen:
        """The state is back, the training begins: look from here on. Returns what was found. Raises
        UnmanagedStateError."""
        self._is_on = True
        seen, kept = self._look(sys._getframe(1))
        self._remedies.at_entry(seen, places_of(sys._getframe(1)))
        self._check_parameters(seen, kept)
        self._check_schedulers(seen, kept, search=True)
        self._check_ddp(seen)
        tell_of_cudnn_dropout(self._targets, self._unmanaged)
        self._rebound.at_entry(self._targets, seen)
        return seen

    def at_boundary(self) -> None:
        """A boundary was passed. Raises UnmanagedStateError."""
        if self._unmanaged.has_refused and (refusal := self._unmanaged.refusal) is not None:
            raise refusal
        if not self._is_on:
            return  # an evaluation
        if self._strangers.waiting:
            self._check_strangers(sys._getframe(1))
        if self._watch.schedulers:
            self._check_steps_of_schedulers()
        self._boundaries += 1
        if self.refreshed.steps:
            self.refreshed.at_boundary()
        if self._uneven and self._boundaries == 1:
            self._check_join()
        if self._boundaries >= self._next:
            self._next += 1 if self._boundaries < _FIRST_LOOKS else self._boundaries
            self._collector.devices.wait_for_update()  # a look reads from them
            self._look_again(sys._getframe(1))
            self.refreshed.watch((one.reference() for one in self._watch.modules.values()), self._targets.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around an evaluation: whatever moves inside is none of the training's."""
        if self._is_outside:
            yield
            return
        count = self._evaluations = self._evaluations + 1
        # A program may have such a block in every step: it is not to cost a look each time.
        closely = self._boundaries > 0 and (count <= _FIRST_LOOKS or count & (count - 1) == 0)
        self._is_outside = True
        self.refreshed.leave()
        try:
            if closely and not self._is_stale:
                self._compare()
            yield
        finally:
            self._is_outside = False
            if closely:
                self._watch_anew()
            else:
                self._is_stale = True

    # --- looking ---

    def _kept(self) -> Kept:
        return Kept(self._targets, self._loaders, self._collector, self._also_kept, tuple(self._own.values()))

    def _holds(self, tensor: torch.Tensor) -> bool:
        return self._kept().has(tensor)

    def _look(self, frame: FrameType | None) -> tuple[Seen, Kept]:
        if self._is_stale:
            self._watch_anew()
        kept = self._kept()
        loose = [p for _, p in self._loose_parameters(kept)]
        seen = look(frame, self._roots, map(id, (*loose, *self._targets.values())))
        if not seen.complete and not self._has_told_of_size:
            self._has_told_of_size = True
            logger.info("the program has more objects than the checks look at, so what is not named may go unnoticed")
        return seen, kept

    def _look_again(self, frame: FrameType | None) -> None:
        self._strangers.look_again()
        if 1 < self._boundaries <= _FIRST_LOOKS:
            if self._is_stale:
                self._watch_anew()
            self._compare()
        else:
            seen, kept = self._look(frame)
            self._check_parameters(seen, kept)
            self._check_schedulers(seen, kept, search=self._boundaries == 1)
            self._compare()
            self._watch_found(seen, kept)
            self._generators.watch(seen, kept, self._epoch())
        for told in self._weights_of_samplers.look(self._loaders, self._epoch(), self._holds):
            self._unmanaged.risk(*told)
        if self._boundaries not in (2, 4):  # it goes through all variables
            self._rebound.look(frame)

    def _named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        components = self._collector.components.items()
        return {name: c.optimizer for name, c in components if isinstance(c, OptimizerComponent)}

    def _optimizer_ids(self) -> set[int]:
        components = self._collector.components
        own = {id(t) for t in self._targets.values() if isinstance(t, torch.optim.Optimizer)}
        own |= {id(o) for c in components.values() if isinstance(c, OptimizerComponent) for o in (c.optimizer, c.local)}
        return own | self._strangers.covered_ids()

    def _name_of(self, target: str, seen: Seen) -> str:
        """``optimizer "opt"``: by the program's variable where there is one."""
        found = seen.optimizers.get(id(self._targets[target])) or seen.optimizers.get(
            id(self._named_optimizers().get(target))
        )
        return f'optimizer "{target if found is None or not found.place else found.name}"'

    # --- parameters ---

    def _loose_parameters(self, kept: Kept) -> list[tuple[str, torch.Tensor]]:
        """The trained parameters of the named optimizers that no named object keeps, and their optimizer's name."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, optimizer in self._named_optimizers().items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and not kept.has(parameter):
                        found.setdefault(id(parameter), (name, parameter))
        return list(found.values())

    def _check_parameters(self, seen: Seen, kept: Kept) -> None:
        loose = self._loose_parameters(kept)
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
        what = f"{self._name_of(optimizer, seen)} trains {count} that none of the guard's objects holds: "
        what += listed(names, 3)
        if owners:
            remedy = f"Write {self._remedies.line('model', seen, owners.values())}"
        elif variables:
            content = ", ".join(
                f'"{self._remedies.key(v.name)}": torch.nn.ParameterList([{v.name}])' for v in variables[:3]
            )
            remedy = f"Write Guard(stateful={{{content}}}, ...)"
        else:
            remedy = "Give the guard the module that has them (model=[...]), or name them in stateful="
        self._unmanaged.certain(what, remedy)

    # --- optimizers ---

    def _check_strangers(self, frame: FrameType | None) -> None:
        others = [t for t in self._targets.values() if kind_of(type(t)) == "instance"]
        for optimizer in self._strangers.at_boundary(self._collector.optimizers(), others):
            seen, _ = self._look(frame)
            name = self._path_of(optimizer, seen) or f"of {_count(optimizer)} parameters"
            found = seen.optimizers.get(id(optimizer))
            shown = str(found) if found is not None else f"{name} ({type(optimizer).__name__})"
            idle = self._replaced_by(optimizer)
            if idle:
                what = (
                    f"optimizer {shown} steps, and {self._name_of(idle, seen)}, which the guard was given for the same "
                    "parameters, never does: it was made anew after the guard"
                )
                remedy = "Make the optimizer before the guard, and once"
            else:
                what = f"optimizer {shown} steps and is not named"
                own = Found(name, "" if found is None else found.place, optimizer)
                remedy = self._remedies.how_to_name("optimizer", seen, own)
            self._unmanaged.certain(what, remedy)

    def _path_of(self, optimizer: torch.optim.Optimizer, seen: Seen) -> str:
        for name, target in self._named_optimizers().items():
            named = seen.optimizers.get(id(target))
            for attribute, value in attributes_of(target).items():
                if value is optimizer:
                    return f"{name if named is None else named.name}.{attribute}"
        found = seen.optimizers.get(id(optimizer))
        return "" if found is None else found.name

    def _replaced_by(self, optimizer: torch.optim.Optimizer) -> str:
        """The named optimizer that has never stepped and has parameters of `optimizer`, which does not hang on it."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, target in self._named_optimizers().items():
            if id(target) in self._strangers.stepped or id(optimizer) in reachable(target, models=True):
                continue
            if any(id(p) in own for group in target.param_groups for p in group["params"]):
                return name
        return ""

    # --- schedulers ---

    def _check_schedulers(self, seen: Seen, kept: Kept, *, search: bool) -> None:
        ours = self._optimizer_ids()
        candidates = dict(seen.schedulers)
        bound = {id(_optimizer_of(found.value)) for found in seen.schedulers.values()}
        bound |= {id(_optimizer_of(t)) for t in self._targets.values()}
        if search:
            # A scheduler wraps its optimizer's step(). The search takes 40 ms, so only where none of them is known.
            hidden = [o for o in self._named_optimizers().values() if "step" in vars(o) and id(o) not in bound]
            for scheduler in find_bound(hidden):
                candidates[id(scheduler)] = Found("", "", scheduler)
        children = {key for found in candidates.values() for key in inner_schedulers(found.value)}
        for key, found in candidates.items():
            if id(_optimizer_of(found.value)) not in ours or kept.has_object(found.value) or key in children:
                continue
            if key in self._watch.schedulers:
                continue
            # It may be unused, or left over from an earlier training: it is refused when it steps.
            steps = _steps_of(found.value)
            added = found if found.name else Found("the_scheduler", "", found.value)
            remedy = self._remedies.how_to_name("lr_scheduler", seen, added)
            self._watch.schedulers[key] = _Watched(weakref.ref(found.value), _shown(found), steps, 0, remedy=remedy)
            if steps <= 1:
                what = f"scheduler {_shown(found)} belongs to an optimizer of the guard and is not named"
                self._unmanaged.hint(f"{what}: its first step will be refused", remedy)

    def _check_steps_of_schedulers(self) -> None:
        for key, watched in list(self._watch.schedulers.items()):
            scheduler = watched.reference()
            if scheduler is None:
                del self._watch.schedulers[key]
            elif _steps_of(scheduler) != watched.look:
                watched.look = _steps_of(scheduler)
                what = f"scheduler {watched.name} belongs to an optimizer of the guard, steps and is not named"
                self._unmanaged.certain(what, watched.remedy)

    # --- DDP ---

    def _check_ddp(self, seen: Seen) -> None:
        """What keeps DDP's order of gradients from being restored. With two ranks no order counts: a + b is b + a."""
        known, own = {id(module) for _, module in self._ddp}, {id(p) for p in self._collector.parameters}
        for found in seen.modules.values():
            module = found.value
            if not isinstance(module, DistributedDataParallel) or id(module) in known:
                continue
            if module.process_group.size() >= _ORDER_COUNTS and any(id(p) in own for p in module.parameters()):
                self._unmanaged.risk(
                    f"module {_shown(found)} wraps the guard's model in DDP, and the guard was given the model "
                    "inside, so the last bits of a resumed run may differ",
                    f"Write Guard(model={found.name}, ...)",
                )

    def _check_join(self) -> None:
        """Ranks that end an epoch at different steps have no boundary in common. Without `join` a program has to give
        each rank as many steps, which it does by itself where the loaders differ (it counts, or begins them anew)."""
        for name, module in self._ddp:
            config = getattr(module, "_join_config", None)
            if getattr(config, "enable", False) and not getattr(config, "throw_on_early_termination", False):
                self._unmanaged.certain(
                    f"{name} is trained inside join(), and {self._uneven}: the ranks make different numbers of steps "
                    "and have no boundary in common to stop at",
                    "Give each rank as many batches: a DistributedSampler over the whole data set, drop_last=True, or "
                    "join(throw_on_early_termination=True)",
                )

    # --- what moves ---

    def _watch_found(self, seen: Seen, kept: Kept) -> None:
        """Begin to watch what has been found and is not kept."""
        watch, epoch = self._watch, self._epoch()
        claimed: set[int] = set()
        for key, found in _outermost(seen.modules, kept):
            if key in watch.modules:
                continue
            parameters, buffers = kept.missing(found.value)
            parameters = [p for p in parameters if id(p) not in claimed]
            buffers = [b for b in buffers if id(b) not in claimed]
            if (parameters or buffers) and not is_sharded_in_part(found.value):
                claimed.update(map(id, (*parameters, *buffers)))
                looks = TensorsLook.at(parameters), TensorsLook.at(buffers)
                remedy = self._remedies.how_to_keep(found)
                watch.modules[key] = _Watched(weakref.ref(found.value), _shown(found), looks, epoch, remedy=remedy)
        for key, found in seen.scalers.items():
            if key not in watch.scalers and not kept.has_object(found.value):
                watch.scalers[key] = _Watched(weakref.ref(found.value), _shown(found), _scale_of(found.value), epoch)
        ours = self._optimizer_ids()
        for key, found in seen.scheduler_likes.items():
            attributes = attributes_of(found.value)
            if key in watch.scheduler_likes or id(attributes["optimizer"]) not in ours:
                continue
            if not kept.has_object(found.value):
                look = NumbersLook.at(attributes)
                watch.scheduler_likes[key] = _Watched(_reference(found.value), _shown(found), look, epoch)

    def _watch_anew(self) -> None:
        """Take everything that is watched as it is now."""
        self._is_stale = False
        watch, epoch = self._watch, self._epoch()
        kept: Kept | None = None
        for watched in watch.modules.values():
            if (module := watched.reference()) is not None:
                kept = kept or self._kept()
                parameters, buffers = kept.missing(module)
                watched.look, watched.epoch = (TensorsLook.at(parameters), TensorsLook.at(buffers)), epoch
        self._generators.take_anew(epoch)
        for watched in watch.scalers.values():
            if (scaler := watched.reference()) is not None:
                watched.look = _scale_of(scaler)
        self._weights_of_samplers.forget()

    def _compare(self) -> None:
        """Compare what is watched with the look before. Raises UnmanagedStateError."""
        self._compare_scalers()
        self._generators.compare(self._epoch())
        if self._watch.modules:
            self._compare_modules(self._kept())
        for key, watched in list(self._watch.scheduler_likes.items()):
            value = watched.reference()
            if value is None:
                del self._watch.scheduler_likes[key]
                continue
            now = NumbersLook.at(attributes_of(value))
            if moved := watched.look.moved(now):
                self._unmanaged.risk(
                    f"{watched.name} has an optimizer of the guard, is not named, and changes: {listed(moved, 3)}",
                    "If it sets the learning rate, name it: Guard(lr_scheduler=..., ...); it needs state_dict and "
                    "load_state_dict",
                )
            watched.look = now

    def _compare_scalers(self) -> None:
        for key, watched in list(self._watch.scalers.items()):
            scaler = watched.reference()
            if scaler is None:
                del self._watch.scalers[key]
                continue
            now = _scale_of(scaler)
            if now != watched.look and None not in (now, watched.look):
                name = watched.name.split('"')[1]
                self._unmanaged.certain(
                    f"scaler {watched.name} is used and not named", f"Write Guard(scaler={name}, ...)"
                )
            watched.look = now

    def _compare_modules(self, kept: Kept) -> None:
        epoch = self._epoch()
        for key, watched in list(self._watch.modules.items()):
            module = watched.reference()
            if module is None:
                del self._watch.modules[key]
                continue
            if is_sharded_in_part(module):
                continue
            parameters, buffers = kept.missing(module)
            now = TensorsLook.at(parameters), TensorsLook.at(buffers)
            trained, other = (old.movement(new) is Movement.MOVED for old, new in zip(watched.look, now, strict=True))
            between_epochs = watched.epoch != epoch
            watched.look, watched.epoch = now, epoch
            remedy = watched.remedy
            if trained or other:
                is_set, has_buffers = self.refreshed.are_set(module)
                trained, other = trained and not is_set, other and not has_buffers
            if trained and not between_epochs:
                watched.moves += 1
                self._unmanaged.certain(f"module {watched.name} changes in the training and is not named", remedy)
            elif watched.moves:
                continue  # said before, and worse
            elif trained:
                self._unmanaged.risk(f"module {watched.name} changes between epochs and is not named", remedy)
            elif other:
                self._unmanaged.risk(
                    f"buffers of module {watched.name}, which is not named, change in the training",
                    f"{remedy}, or call eval() on it if it is only evaluated",
                )


def _shown(found: Found) -> str:
    return str(found) if found.name else f"({type(found.value).__name__})"


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _owner_of(parameter: torch.Tensor, seen: Seen) -> tuple[Found | None, str]:
    """The module among the variables that has `parameter`, and its name there."""
    for found in seen.modules.values():
        for place, own in found.value.named_parameters():
            if own is parameter:
                return found, place
    return None, ""


def _optimizer_of(scheduler: object) -> object:
    return attributes_of(scheduler).get("optimizer")


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


def _outermost(modules: Mapping[int, Found], kept: Kept) -> Sequence[tuple[int, Found]]:
    """The modules that are not kept, those that contain others in front."""
    own = [(key, found) for key, found in modules.items() if not kept.has_object(found.value)]
    return sorted(own, key=lambda item: -sum(1 for _ in item[1].value.modules()))


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference, or where the class has none a number that only tells while the object is found again."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None
