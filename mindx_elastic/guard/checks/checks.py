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
a scheduler of a named optimizer, not named                      it steps
a `GradScaler`, not named                                        it is enabled and has moved
a module, not named                                              its parameters change between two boundaries of an
                                                                 epoch; buffers, or between epochs: a risk
a generator                                                      it moves twice between boundaries of an epoch
===============================================================  ==================================================

What an evaluation inside ``guard.outside_step()`` does counts nowhere.
"""

from __future__ import annotations

import re
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
from mindx_elastic.guard.checks.movements import GeneratorLook, TensorsLook, kept_anyway, scale_of, steps_of
from mindx_elastic.guard.checks.named_state import NamedState
from mindx_elastic.guard.checks.program_variables import (
    Found,
    Seen,
    inner_schedulers,
    kind_of,
    look,
)
from mindx_elastic.guard.checks.remedies import Remedies
from mindx_elastic.guard.checks.unnamed_optimizers import UnnamedOptimizers
from mindx_elastic.guard.opening import Opening

__all__ = ["FIRST_LOOKS", "Checks"]

FIRST_LOOKS = 4


_DRAWS = 2
"""One draw between two boundaries may belong to an evaluation or to the start; a second one is certain."""
_MOST_WATCHED, _MOST_NAMES = 256, 3
_MOVING = ("scaler", "generator", "module")


@dataclass
class _Watched:
    """An object that is not kept, as it was at the last look."""

    found: str
    """With its name, as `Found` shows it."""
    name: str
    get: Callable[[], Any]
    """None: it is no more."""
    look: Any = None
    """None: it has not been looked at, or cannot be."""
    epoch: int = 0
    moves: int = 0


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
        self._unmanaged, self._targets = opening.unmanaged, opening.targets
        self._collector, self._ddp, self._epoch = opening.collector, opening.ddp, epoch
        self._loaders, self._also_kept, self._own = tuple(loaders), tuple(kept), dict(own or {})
        self._roots = {**(more or {}), **self._targets}
        self._boundaries, self._evaluations = 0, 0
        self._is_on = False
        self._watched: dict[str, dict[int, _Watched]] = {kind: {} for kind in ("scheduler", *_MOVING)}
        """By kind and `id`."""
        self._strangers = UnnamedOptimizers(self._collector.optimizers())
        self._is_outside, self._is_stale = False, True
        self.has_news = False
        """`at_boundary` has something to do though it is not a look."""
        self._remedies = Remedies(self._targets, self._own, is_layered=bool(more))
        self._kept_anyway = kept_anyway()

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
        if self._watched["scheduler"]:
            self._check_steps_of_schedulers()
        if number == 1:
            self._tell_of_join()
        if is_look:
            self._look_again(sys._getframe(1))
        self.has_news = bool(self._watched["scheduler"])

    def inside_window(self) -> None:
        """A step has ended, inside of an accumulation window. Raises UnmanagedStateError."""
        if self._is_on and self._strangers.waiting:
            self._check_strangers(sys._getframe(1))

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
        seen = look(frame, self._roots, (id(parameter) for _, parameter in loose))
        self._check_parameters(loose, seen)
        self._check_schedulers(seen, kept)
        self._watch_found(seen, kept)

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
                variables.append(seen.asked[id(parameter)])
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
            if key in self._watched["scheduler"]:
                continue
            # It may be unused, or left over from an earlier training: it is refused when it steps.
            self._watched["scheduler"][key] = _watched(found, steps_of(found.value))

    def _check_steps_of_schedulers(self) -> None:
        for watched, before, _ in self._looks("scheduler", steps_of, tells=True):
            if watched.look != before:
                what = f"scheduler {watched.found} belongs to an optimizer of the guard, steps and is not named"
                self._unmanaged.certain(what, self._remedies.argument_line("lr_scheduler", [watched.name]))

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
        found = {kind: {k: f for k, f in seen.of[kind].items() if not kept.has_object(f.value)} for kind in _MOVING}
        claimed: set[int] = set()
        # Those that contain others in front.
        for key, module in sorted(found["module"].items(), key=lambda item: -sum(1 for _ in item[1].value.modules())):
            missing = {id(tensor) for each in kept.missing(module.value) for tensor in each}
            if not missing - claimed or TensorsLook.of_module(module.value, kept) is None:
                del found["module"][key]
            claimed |= missing
        for kind, own in found.items():
            watched = self._watched[kind]
            for key, each in own.items():
                if key not in watched and key not in self._kept_anyway and len(watched) < _MOST_WATCHED:
                    watched[key] = _watched(each)
        # Some generators cannot be referred to weakly, so they are held, small as they are, until none is found there.
        for key in self._watched["generator"].keys() - found["generator"].keys():
            del self._watched["generator"][key]

    def _looks(self, kind: str, look: Callable[[Any], Any], *, tells: bool) -> Iterator[tuple[_Watched, Any, bool]]:
        """Look at those of a kind that still exist: with the look before, and whether that was in this epoch. `tells`:
        else the looks are for later ones only."""
        for key, watched in list(self._watched[kind].items()):
            if (value := watched.get()) is None:
                del self._watched[kind][key]
                continue
            before, epoch = watched.look, watched.epoch
            watched.look, watched.epoch = look(value), self._epoch()
            if tells and before is not None and watched.look is not None:
                yield watched, before, epoch == watched.epoch

    def _compare(self) -> None:
        """Compare what is watched with the look before, unless an evaluation came between. Raises
        UnmanagedStateError."""
        tells, self._is_stale = not self._is_stale, False
        for watched, before, _ in self._looks("scaler", scale_of, tells=tells):
            if watched.look != before:
                remedy = f"Write Guard(scaler={watched.name}, ...)"
                self._unmanaged.certain(f"scaler {watched.found} is used and not named", remedy)
        often: list[_Watched] = []
        for watched, before, is_same_epoch in self._looks("generator", GeneratorLook.at, tells=tells):
            if is_same_epoch and before.shows_draws(watched.look):
                watched.moves += 1
                often += [watched] * (watched.moves == _DRAWS)
        if often:
            self._tell_of_generators(often)
        if self._watched["module"]:
            kept = self._kept()
            for watched, before, is_same_epoch in self._looks(
                "module", lambda module: TensorsLook.of_module(module, kept), tells=tells
            ):
                self._judge_module(watched, before, is_same_epoch=is_same_epoch)

    def _tell_of_generators(self, often: Sequence[_Watched]) -> None:
        names = [watched.name for watched in often]
        if len(names) > _MOST_NAMES:  # by the objects that have them
            names = list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))
        more = f" (and {len(often) - 1} more)" if len(often) > 1 else ""
        remedy = f"{self._remedies.stateful_line(names)}, or seed it in each step"
        if owner := names[0].rpartition(".")[0]:
            remedy += f". Name whatever else of {owner} changes in the training, too"
        what = f"generator {often[0].found}{more} draws numbers in the training and is not kept"
        self._unmanaged.certain(what, remedy)

    def _judge_module(self, watched: _Watched, before: Sequence[TensorsLook], *, is_same_epoch: bool) -> None:
        trained, other = (old.has_moved(new) for old, new in zip(before, watched.look, strict=True))
        remedy = self._remedies.stateful_line([watched.name])
        if trained and is_same_epoch:
            watched.moves += 1
            self._unmanaged.certain(f"module {watched.found} changes in the training and is not named", remedy)
        elif watched.moves:
            return  # said before, and worse
        elif trained:
            self._unmanaged.risk(f"module {watched.found} changes between epochs and is not named", remedy)
        elif other:
            self._unmanaged.risk(
                f"buffers of module {watched.found}, which is not named, change in the training",
                f"{remedy}, or call eval() on it if it is only evaluated",
            )


def _watched(found: Found, look: Any = None) -> _Watched:
    value, names = found.value, (str(found), found.name)
    try:
        return _Watched(*names, weakref.ref(value), look)
    except TypeError:  # a generator of numpy's
        return _Watched(*names, lambda: value, look)


def _owner_of(parameter: torch.Tensor, seen: Seen) -> tuple[Found | None, str]:
    """The module among the variables that has `parameter`, and its name there."""
    for found in seen.of["module"].values():
        for place, own in found.value.named_parameters():
            if own is parameter:
                return found, place
    return None, ""
