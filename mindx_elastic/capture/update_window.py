"""Decides whether a step that an exception cut off after its last ``optimizer.step()`` is the coming boundary.

Programs log in the window between that update and `step_end`, and an exception there leaves weights that are not the
last boundary's any more. They are the coming boundary's if everything that changes in this window has changed. What
changes in a step is learned from the boundaries of the steps before; what changes in the window, from some steps that
are also looked at right after their last update:

================================  =====================================================================================
seen in the window                the state after an exception is the coming boundary if
================================  =====================================================================================
nothing moves                     every optimizer has stepped as often as in every step before
schedulers, scaler, stateful      each value that moved in the step before has moved; numbers that count by as much
objects, options of groups        (a value that also moves before the window proves nothing: refused)
parameters (EMA, clipping)        each was changed in place as often as in the step before
random numbers, buffers           never: how many more would have been drawn is not known
parameters, through ``.data``     never: no counter tells whether they have changed (`hidden_changes`)
================================  =====================================================================================

Steps 5 to 8 of a process are looked at (other looks are at the first ones), then two in fifty up to about step 1000,
then two in 1000 (two, because some programs count from 0), so that what is done only now and then is seen too; the
others cost nothing. Code of the window that has never run in a step that was looked at stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from mindx_elastic.capture.collector import BufferLook, Collector
from mindx_elastic.capture.components import ModuleComponent, OptimizerComponent, PlainComponent
from mindx_elastic.capture.copying import same_tree
from mindx_elastic.capture.graph_replays import is_capturing
from mindx_elastic.capture.rng import capture_rng, equal_rng
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.capture.weight_samples import WeightSample, WeightSamples
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.printable import listed

__all__ = ["UpdateWindow"]

_FIRST, _LAST, _EVERY = 5, 8, 50
_MANY, _RARELY = 40, 1000
_ENOUGH = 2
_PLAIN = frozenset((type(None), bool, int, float, str))
_Leaves = dict[str, Any]


@dataclass
class _Middle:
    """The volatile state right after the last update of a step."""

    rng: dict[str, Any]
    parts: dict[str, Any]
    buffers: Mapping[str, BufferLook]
    sample: Mapping[str, WeightSample] | None


@dataclass
class _Learned:
    """What changes in the window, as far as the looks have shown."""

    draws: bool = False
    buffers: set[str] = field(default_factory=set)
    hidden: int = 0
    """Number of parameters that change without torch's knowledge."""
    moved: dict[str, set[str]] = field(default_factory=dict)
    """The values that have moved in a window, by component."""
    num_moves: dict[str, int] = field(default_factory=dict)
    """In how many windows they have moved, by component."""
    both: dict[str, set[str]] = field(default_factory=dict)
    """And those that have also moved before it, in the same step."""


class UpdateWindow:
    """One per guard. For the training thread; only `_look` runs in the thread that updates."""

    def __init__(self, collector: Collector, gate: UpdateGate) -> None:
        self._collector, self._gate = collector, gate
        self._samples = WeightSamples(collector)
        self._learned = _Learned()
        self.num_windows = 0
        """How many were looked at."""
        self._boundaries = 0
        self._middle: _Middle | None = None
        self._names = list(collector.components)
        self._broken: str | None = None
        # These copies are never changed in place, so the last two boundaries' are kept without another copy.
        self._base: Sequence[Any] = collector.copies
        self._before: Sequence[Any] = self._base  # around the last step with updates
        self._after: Sequence[Any] = self._base

    def at_boundary(self, step: int, sample: Mapping[str, WeightSample] | None) -> None:
        """Boundary `step` has just been copied. Learns from the look into this step and plans the next one. `sample`:
        of the weights as they are, where one was taken."""
        self._boundaries += 1
        before, self._base = self._base, self._collector.copies
        if self._gate.had_updates:  # not in a step that the scaler has skipped
            self._before, self._after = before, self._base
        middle, self._middle = self._middle, None
        if middle is not None and self._broken is None:
            try:
                self._learn(middle, self._by_name(before), sample)
            except Exception as error:  # an object that cannot be compared does not end the training
                self._broken = f"the state cannot be compared ({type(error).__name__}: {error})"
        if (coming := self._boundaries + 1) <= _LAST:
            wanted = coming >= _FIRST
        else:
            wanted = (step + 1) % (_EVERY if self.num_windows < _MANY else _RARELY) in (0, 1)
        self._gate.at_last_update = self._look if wanted and self._broken is None else None

    def standing(self) -> list[str]:
        """The known reasons for which an exception in the window always costs the step; empty: there are none."""
        learned = self._learned
        found = [self._broken] if self._broken else []
        plain = [c for c in self._collector.components.values() if isinstance(c, PlainComponent)]
        found += [f"{component.name} takes too long to be compared" for component in plain if component.is_heavy]
        if not self._gate.steady:
            found.append("the optimizers do not step equally often in every step")
        if not self._gate.even:
            found.append("parameters are not changed in place equally often in every step")
        if learned.draws:
            found.append("random numbers are drawn between the last optimizer.step() and step_end()")
        if learned.buffers:
            found.append(f"{_some(learned.buffers)} changes between the last optimizer.step() and step_end()")
        if learned.hidden:
            found.append(
                f"{learned.hidden} parameters are changed between the last optimizer.step() and step_end() without "
                "torch's knowledge (through .data, say)"
            )
        for name, values in learned.both.items():
            found.append(f"{name}: {_some(values)} changes before and after the last optimizer.step()")
        return found

    def pending(self, error: BaseException | None) -> list[str]:
        """After an exception: what keeps the live state from being the coming boundary; empty: it is the boundary."""
        gate, learned = self._gate, self._learned
        if gate.state is not GateState.DIRTY:
            return ["an optimizer.step() was in progress or failed half-way"]
        found = self.standing()
        names = {id(c.optimizer): n for n, c in self._collector.components.items() if isinstance(c, OptimizerComponent)}
        found += [
            f"{names.get(key, 'an optimizer')} has stepped {done} times, in the steps before {usual}"
            for key, done, usual in gate.unusual_updates(names)
        ]
        if self.num_windows < _ENOUGH:
            found.append(f"only {self.num_windows} steps before could tell what belongs to a step")
        found += self._raised_in(None if error is None else error.__traceback__)
        if found:
            return found
        if changed := gate.unusual_changes():
            found.append(f"{changed} parameters were not changed in place as often as in the step before")
        now = _flat_parts(self._parts())
        base, before, after = (_flat_parts(self._by_name(c)) for c in (self._base, self._before, self._after))
        for name in learned.moved:
            missing = {
                leaf
                for leaf in learned.moved[name]
                if leaf in before[name]  # else it came in the last step, which the length shows as well
                and not _moved_alike(
                    (before[name].get(leaf), after[name].get(leaf)), (base[name].get(leaf), now[name].get(leaf))
                )
            }
            if missing:
                found.append(f"{name} has not moved yet ({_some(missing)})")
            elif (
                learned.num_moves[name] < self.num_windows
                and not self._is_scheduled(name)
                and not learned.moved[name] & _differing(base[name], now[name])
            ):
                found.append(f"{name} moves in some steps ({_some(learned.moved[name])}) and has not moved in this one")
        return found

    def _is_scheduled(self, name: str) -> bool:
        """Whether `name` is an optimizer whose options a named scheduler sets, which shows more."""
        component = self._collector.components[name]
        if not isinstance(component, OptimizerComponent):
            return False
        plain = [c.target for c in self._collector.components.values() if isinstance(c, PlainComponent)]
        return any(attributes_of(target).get("optimizer") is component.optimizer for target in plain)

    def _raised_in(self, traceback: TracebackType | None) -> list[str]:
        """The target that the exception comes out of, if any: it may have changed in part."""
        targets = {id(c.target): n for n, c in self._collector.components.items() if isinstance(c, PlainComponent)}
        targets |= {
            id(c.optimizer): n for n, c in self._collector.components.items() if isinstance(c, OptimizerComponent)
        }
        targets |= {id(c.module): n for n, c in self._collector.components.items() if isinstance(c, ModuleComponent)}
        while traceback is not None:
            owner = traceback.tb_frame.f_locals.get("self")
            if owner is not None and id(owner) in targets:
                return [f"the exception comes out of {targets[id(owner)]}"]
            traceback = traceback.tb_next
        return []

    # --- learning ---

    def _look(self) -> None:
        """Right after the last update of a step."""
        try:
            sample = None if self._learned.hidden or is_capturing() else self._samples.take()
            buffers = self._collector.look_at_buffers()
            self._middle = _Middle(capture_rng(self._collector.rng), self._parts(), buffers, sample)
        except Exception as error:  # a `state_dict` of the program's that raises
            self._middle, self._broken = None, f"the state cannot be looked at ({type(error).__name__}: {error})"

    def _learn(self, middle: _Middle, before: Mapping[str, Any], sample: Mapping[str, WeightSample] | None) -> None:
        learned, collector, base = self._learned, self._collector, self._by_name(self._base)
        self.num_windows += 1
        learned.draws |= not equal_rng(middle.rng, collector.rng)
        if middle.sample is not None:
            learned.hidden = self._samples.num_hidden(middle.sample, sample)
        learned.buffers.update(collector.changed_buffers(middle.buffers))
        for name, part in middle.parts.items():
            if not part and not base[name]:
                continue
            here = _leaves(part)
            if moved := _differing(here, _leaves(base[name])):
                learned.moved.setdefault(name, set()).update(moved)
                learned.num_moves[name] = learned.num_moves.get(name, 0) + 1
                if both := moved & _differing(_leaves(before[name]), here):
                    learned.both.setdefault(name, set()).update(both)

    def _by_name(self, copies: Sequence[Any]) -> dict[str, Any]:
        """The values of `Collector.copies` by name."""
        return dict(zip(self._names, copies, strict=True))

    def _parts(self) -> dict[str, Any]:
        """The same state as it is now."""
        found: dict[str, Any] = {}
        for name, component in self._collector.components.items():
            if isinstance(component, (PlainComponent, OptimizerComponent, ModuleComponent)):
                found[name] = component.look()
        return found


def _flat_parts(parts: Mapping[str, Any]) -> dict[str, _Leaves]:
    return {name: _leaves(value) for name, value in parts.items()}


def _leaves(value: Any) -> _Leaves:
    """What is in nested containers, and how long these are, by place. In one call."""
    found: _Leaves = {}
    waiting = [("", value)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, dict):
            items: Iterable[tuple[Any, Any]] = item.items()
        elif isinstance(item, (list, tuple)):
            items = enumerate(item)
        else:
            found[place] = item
            continue
        found[f"{place} (length)"] = len(item)
        for key, each in items:
            waiting.append((f"{place}.{key}" if place else str(key), each))
    return found


def _differing(one: _Leaves, other: _Leaves) -> set[str]:
    changed = one.keys() ^ other.keys()
    for leaf, value in one.items():
        now = other.get(leaf)
        is_same = value is now or (type(value) in _PLAIN and type(value) is type(now) and value == now)
        if not is_same and leaf in other and not same_tree(value, now):
            changed.add(leaf)
    return changed


def _moved_alike(then: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """Whether a value has moved in this step as it did in the last one that was completed; each from, to."""
    if same_tree(*then):
        return True  # it stood still then; most values that move in a window do not always
    if all(type(value) is int for value in (*then, *now)):
        return bool(now[1] - now[0] == then[1] - then[0])
    return not same_tree(*now)


def _some(values: set[str]) -> str:
    return listed(sorted(values), 3)
