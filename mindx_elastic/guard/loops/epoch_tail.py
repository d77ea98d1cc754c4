"""The end of an epoch: where the job stops, for the code after its inner loop (the *tail*) belongs to it.

Such code reads what the inner loop has set, and a run that is resumed at the last boundary of an epoch comes to it
without a batch. So that boundary is copied as any other, for an exception or a deadline; but the usual stop, snapshots
and periodic saves wait until the tail has run. The boundary is then copied again, with the news that nothing is left of
its epoch, and a resumed run begins with the next one. A kill does not wait, and neither does a stop in
`guard.outside_step`: the boundary in front of the tail has the values that the epoch has set.

==========================================  ============================================================================
the last batch of an epoch is known         the stop
==========================================  ============================================================================
with it (the loader knows its length, or    waits for the end of the tail
the epoch is a loop over `guard.steps`)
when the next one is asked for              comes at once: the boundary has the values that the tail may read
==========================================  ============================================================================

A second pass within the epoch, or a break out of both loops, ends the wait as well: at the next boundary, or at the end
of the block.

A boundary that is copied again keeps the small state in front of the tail as well, until the next one: a rank that was
killed in its tail resumes in front of it, and the tail may have collectives. Then all ranks go back (`tail_side`).

::

    for epoch in guard.epochs(90):
        losses = []
        for x, y in loader:              # the inner loop
            ...
            losses.append(loss.item())
            guard.step_end()
        print(epoch, loss.item(), sum(losses) / len(losses))    # the tail

Those values are what has changed since the loop over the epochs began, in the functions between it and the boundary:
variables, and attributes of the program's objects. When the resumed loop over the loader ends, they are set in the
frames of the program, as a debugger sets them. (To take the last step once more would give the tail the loss of other
weights.)
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.copying import map_tensors, same_tree
from mindx_elastic.capture.loop_ends import CHANGES_WEIGHTS, FRONT, OVER, VALUES, without_end
from mindx_elastic.capture.values import is_plain_class, put_back, snapshot
from mindx_elastic.capture.weight_samples import HiddenChanges, WeightSample, WeightSamples
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import askable, attributes_of, is_comparable, table_of
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError, UnsupportedStateError
from mindx_elastic.guard.checks.program_variables import is_library, locals_of, program_frames
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.persist.flatten import MAX_DEPTH, flatten

__all__ = ["EpochTail", "EpochValues", "put_back_values", "stored_size"]

_VALUE, _LARGE = "value", "large"  # keys of what is kept of a name
_SCALARS, _SIZE_OF_SCALAR = frozenset((type(None), bool, int, float, str)), 8
_LEAVES = frozenset((bytes, complex, torch.Size, torch.dtype, torch.device))
_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, tuple, deque, set, frozenset))
_MOST_BYTES = 1 << 20
"""The most of one rank: losses and sums have less, batches and outputs have more."""
_MOST_ITEMS = 20_000  # in all lists and dicts of a value: 10 ms, twice an epoch


class _Unknown:
    """Stands for what cannot be kept. Its objects have attributes and nothing else."""


class _TooLarge(_Unknown):
    """The value is larger than what is kept."""


def _function_of(frame: FrameType) -> str:
    """The name of its function, which no other function around it has; the same in the next start."""
    code = frame.f_code
    name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")  # new in Python 3.11
    return f"{name} in {os.path.basename(code.co_filename)}"


def _globals_of(frame: FrameType) -> str:
    return f"globals of {os.path.basename(frame.f_code.co_filename)}"


class EpochValues:
    """What the functions that run have changed since a loop over epochs began, where this is made. Training thread."""

    def __init__(self, frame: FrameType | None, kept: Collection[int]) -> None:
        """`frame`: that of the loop. `kept`: `id` of what the guard keeps by itself, and of data sets."""
        self._kept = kept
        # A generator of the program's own hands the epochs on: it does not run at a boundary, who asks it does.
        frames = (at for at in program_frames(frame) if not at.f_code.co_flags & inspect.CO_GENERATOR)
        place = next(frames, None)
        self._outermost = None if place is None else place.f_code
        self._before = {
            (identity, name): value if type(value) in _SCALARS else _copied(value)[1]
            for _, (_, identity), name, value in (() if place is None else self._values_of(place))
        }

    def changed(self, frame: FrameType, *, outermost_only: bool = False) -> dict[str, dict[str, Any]]:
        """Copies of what a checkpoint can hold and is small, by function or module, by the object in it (empty: its
        variables), by name: what has changed in the function that loops over epochs, and all of those that it calls.
        `outermost_only`: only variables of the former.

        `frame`: at the boundary, or where the loop over the loader ends.
        """
        found: list[tuple[int, str, str, str, Any]] = []
        for at in program_frames(frame):
            is_outermost = at.f_code is self._outermost
            for scope, (of, identity), name, value in self._values_of(at) if is_outermost or not outermost_only else ():
                before = self._before.get((identity, name), _Unknown)
                if (of and outermost_only) or (
                    type(value) in _SCALARS and type(before) is type(value) and before == value
                ):
                    continue
                size, copied = _copied(value)
                if copied is _TooLarge or not (copied is _Unknown or same_tree(copied, before)):
                    found.append((size, scope, of, name, copied))
            if is_outermost:
                break
        values: dict[str, dict[str, Any]] = {}
        left = _MOST_BYTES
        for size, scope, of, name, copied in sorted(found, key=lambda each: each[0]):
            left -= size
            is_kept = copied is not _TooLarge and left >= 0
            values.setdefault(scope, {}).setdefault(of, {})[name] = {_VALUE: copied} if is_kept else {_LARGE: True}
        return values

    def _values_of(self, frame: FrameType) -> Iterator[tuple[str, tuple[str, object], str, Any]]:
        """Scope, owner, name and value of the variables of its function, of the one that loops over epochs the module's
        too, and of the attributes of the program's own objects in them. An owner is the name of the object (empty: the
        function or the module itself), and what it is in every function, whatever it is called there."""
        scopes = {_function_of(frame): locals_of(frame)}
        if frame.f_code is self._outermost and frame.f_code.co_name != "<module>":
            scopes[_globals_of(frame)] = frame.f_globals
        for scope, variables in scopes.items():
            for name, value in askable(list(variables.items())):
                if callable(value) or type(value) is ModuleType or id(value) in self._kept or name.startswith("__"):
                    continue
                if type(value) in _SCALARS or not _is_own(value):
                    yield scope, ("", scope), name, value
                else:  # a meter: not it, but its attributes
                    yield from ((scope, (name, id(value)), key, held) for key, held in attributes_of(value).items())


def put_back_values(frame: FrameType, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Set them in the functions that run. `frame`: where the loop over the loader ends."""
    left = dict(values)
    missing: list[str] = []
    for at in program_frames(frame):
        for scope, variables in ((_function_of(at), at.f_locals), (_globals_of(at), at.f_globals)):
            owners = dict(left.pop(scope, {}))
            own = owners.pop("", {})
            missing += _put_back(own, variables)
            if own and variables is not at.f_globals and sys.version_info < (3, 13):  # there `f_locals` is a copy
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(at), ctypes.c_int(0))
            for name, attributes in owners.items():
                table = table_of(variables.get(name))
                if type(table) is dict:  # the program has made a new one
                    missing += [f"{name}.{attribute}" for attribute in _put_back(attributes, table)]
        locals_of(at)
    if missing:
        logger.warning(
            "the code after the epoch's loop runs without what its steps had set in %s: too large for a boundary, or "
            "of a class that is gone. Keep sums or counts of it in place of all of it",
            listed(sorted(missing), 4),
        )


def _put_back(kept: Mapping[str, Any], variables: Any) -> list[str]:
    """Returns the names of what is there now (an empty list) and not as it was."""
    missing = []
    for name, each in kept.items():
        now = variables.get(name)
        try:
            if _VALUE in each:
                variables[name] = _in_place(now, put_back(None, each[_VALUE], name))
                continue
        except MismatchError:  # it has no such class any more
            pass
        if now is not None:
            missing.append(name)
    return missing


def _in_place(now: Any, value: Any) -> Any:
    """`value` in the list or dict that the program has made new: others may know it, and the statement that runs. Not
    in its tensors and arrays: a variable that the loop binds to a batch may have been a view of the data before."""
    if type(now) is list and type(value) is list:
        now[:] = value
        return now
    if type(now) in (dict, defaultdict) and type(value) in (dict, defaultdict):  # the factory of the latter is code
        now.clear()
        now.update(value)
        return now
    return value


def _copied(value: Any) -> tuple[int, Any]:
    """Its size, and a copy as a checkpoint holds it, on the CPU: `_TooLarge` or `_Unknown` where none does."""
    size = _size(value)
    if size is None or size > _MOST_BYTES:
        return 0, _Unknown if size is None else _TooLarge
    try:
        copied = map_tensors(snapshot(value, ""), torch.Tensor.cpu)
        return _flat_size(copied), copied
    except UnsupportedStateError:
        return 0, _Unknown


def _is_own(value: Any) -> bool:
    """Whether it is an object of the program's own with attributes, and nothing else. Those of a class that goes on
    from a container have items, too, and a member of an enum is one of few."""
    kind = type(value)
    is_plain = kind.__dictoffset__ != 0 and kind.__basicsize__ <= _Unknown.__basicsize__
    return is_plain and not callable(value) and not is_library(kind.__module__) and not issubclass(kind, Enum)


def stored_size(value: Any) -> int | None:
    """The size of `value` in a checkpoint, in bytes; None: a checkpoint cannot hold it, or it has more than 1 MiB."""
    size = _size(value)
    if size is None or size > _MOST_BYTES:
        return None
    try:
        return _flat_size(value)
    except UnsupportedStateError:
        return None


def _flat_size(value: Any) -> int:
    tree, tensors = flatten(map_tensors(value, torch.Tensor.detach))
    return sum(tensor.nbytes for tensor in tensors.values()) + len(json.dumps(tree))


def _size(value: Any) -> int | None:
    """The size in bytes, about, as far as `_MOST_BYTES`: what is larger is not walked through. None: it has something
    that no checkpoint can hold, or contains itself."""
    size, waiting, done = 0, [(value, 0)], 0
    while waiting and size <= _MOST_BYTES:
        each, depth = waiting.pop()
        kind, done = type(each), done + 1
        if depth > MAX_DEPTH or (type(kind) is not type and not is_comparable(kind)):
            return None
        if kind in (torch.Tensor, np.ndarray):
            size += each.nbytes
        elif kind in _SCALARS or kind in _LEAVES or issubclass(kind, np.generic):
            size += len(each) if kind in (str, bytes) else _SIZE_OF_SCALAR
        elif kind in _CONTAINERS or is_plain_class(kind):
            parts = attributes_of(each) if kind not in _CONTAINERS else each
            if done + len(waiting) + len(parts) > _MOST_ITEMS:
                return _MOST_BYTES + 1
            waiting += [(one, depth + 1) for one in (parts.values() if isinstance(parts, dict) else parts)]
        else:
            return None
    return size


class EpochTail:
    """One per guard. Training thread only."""

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders
        self.is_pending = False
        """The last boundary is the last one of its epoch, and its tail has yet to run."""
        self.layer_waits = False
        """The layer above, which keeps the loop itself, has such code of the program's."""
        self._epoch_values: EpochValues | None = None
        self._values: Mapping[str, Any] = {}  # of the resumed boundary
        self._kept_values: Mapping[str, Any] = {}  # of the last boundary, as far as it ends its epoch
        self._has_told = self._has_kept = False
        self.may_go_on = False
        """The epoch of the last boundary may have ended with it, which only the next batch tells."""

    def enter(
        self,
        collector: Collector,
        *,
        is_alone: bool,
        hidden: HiddenChanges,
        after: Callable[[], None],
        keep_again: Callable[[bool], None],
    ) -> None:
        """`is_alone`: there are no other ranks. `hidden`: watches the weights. `after`: the tail has run, copy its
        boundary again. `keep_again`: the boundary was kept somewhere without what its tail reads; is told whether the
        end was foreseen, so that snapshots and saves wait for the tail."""
        self._collector, self._samples = collector, WeightSamples(collector)
        self.is_alone, self._hidden = is_alone, hidden
        self._after, self._keep_again = after, keep_again
        self.is_pending = False
        self._weights_in_front: Mapping[str, WeightSample] = {}
        collector.before_keeping = self.before_keeping
        if (first := self._loaders.of_epochs) is not None:
            first.at_exhaustion = self._is_at_end

    def resume(self) -> None:
        """The epoch of the resumed boundary comes once more, or none."""
        self._values = self._collector.loop.get(VALUES) or {}

    def begin_loop(self, values: EpochValues | None) -> None:
        """A loop over epochs begins. `values`: what finds the changes; None: the layer above keeps the loop."""
        self._epoch_values = values

    def at_boundary(self, frame: FrameType, *, ends: bool | None = None) -> None:
        """A boundary within an epoch has been copied. `ends`: whether its step is the last one, where a loop over
        ``guard.steps(n)`` makes the epoch; None: the first loader does."""
        self.is_pending = self.may_go_on = self._has_kept = False
        self._values = self._kept_values = {}
        at_end, is_foreseen = self._loaders.at_end_of_epoch() if ends is None else (ends, True)
        waits = self._epoch_values is not None or self.layer_waits
        self.may_go_on = not is_foreseen and waits
        if at_end and waits:
            self._wait()
            self._keep_values(frame)

    def before_keeping(self) -> None:
        """The boundary is to be kept, and may turn out to be the last of its epoch."""
        if self.may_go_on and not self.is_pending and not self._has_kept:
            self._has_kept = True
            self._keep_values(sys._getframe(1))

    def _keep_values(self, frame: FrameType) -> bool:
        """Returns whether the boundary has got other values than it had."""
        if self._epoch_values is None or not (values := self._epoch_values.changed(frame)):
            return False
        before, self._kept_values = self._kept_values, values
        self._collector.add_to_boundary({VALUES: values})
        return not same_tree(before, values)

    def _wait(self) -> None:
        if not self.is_pending:
            self.is_pending = True
            # The tail may exchange the weights for averaged ones, and no boundary has these.
            self._weights_in_front = self._hidden.watch()

    def pass_step(self) -> None:
        """Another step has ended, or the tail, or another epoch begins."""
        self.is_pending = self.may_go_on = False

    def holds_stop(self) -> bool:
        """Call it at a boundary where the job is to stop. Whether it goes on for now."""
        self.before_keeping()
        if self.is_pending and not self._has_told:
            self._has_told = True
            logger.info(
                "at an epoch's end the job stops after the code that follows the loop over the batches, as far as the "
                "time allows"
            )
        return self.is_pending

    def see_last_step(self, frame: FrameType) -> None:
        """A loop over ``guard.steps(n)`` that makes the epoch is over: code after `step_end` may have counted the last
        step."""
        if self.is_pending:
            self._keep_values(frame)

    def _is_at_end(self) -> None:
        """There is no other batch, and the boundary was the last of its epoch."""
        is_unforeseen = self.may_go_on
        if is_unforeseen:
            self._wait()
        self._collector.read_flags()  # the code that follows may evaluate, and end the training
        if self._values:
            self.put_back(sys._getframe(1))
        # Code after `step_end` may have counted the last step, or bound the loss that a function with `step_end` gives.
        is_other = self._keep_values(sys._getframe(1))
        if is_unforeseen or (is_other and self.is_pending):
            self._keep_again(not is_unforeseen)

    def put_back(self, frame: FrameType) -> None:
        """The values of the resumed boundary are needed now."""
        values, self._values = self._values, {}
        if values:
            put_back_values(frame, values)

    # --- what a checkpoint says ---

    def pass_tail(self, epoch: int, *, pass_boundary: Callable[[], None] | None = None, is_left: bool = False) -> None:
        """The tail has run: nothing is left of `epoch`, and its last boundary is here. `pass_boundary`: its last step
        was no boundary before; else that is copied again. `is_left`: the tail has ended the training."""
        self.pass_step()
        collector = self._collector
        if collector.is_other_model():  # made ready for an export: the boundary stays as it was before
            logger.info(
                "the code after the loop over the batches has made another model, so the state is kept as it was "
                "before that code: a program that is started again runs it once more, without a batch"
            )
            return
        loop = without_end(collector.loop)
        found = self._epoch_values
        if found is not None and (values := found.changed(sys._getframe(1), outermost_only=True)):
            loop[VALUES] = values
        if not self.is_alone and pass_boundary is None:
            sample, self._weights_in_front = self._weights_in_front, {}
            changed = bool(self._samples.changed_since(sample))
            loop[FRONT] = {**collector.copy_of_small(), CHANGES_WEIGHTS: changed}
        collector.loop = {**loop, OVER: {"epoch": epoch, "move_on": self._loaders.at_rest(), "left": is_left}}
        (pass_boundary or self._after)()

    def is_over(self, epoch: int) -> bool:
        """Whether nothing is left of `epoch`."""
        return _over(self._collector.loop).get("epoch") == epoch > 0

    def was_left(self) -> bool:
        """Whether a tail has ended the training, which has nothing in front of that tail to come to it again."""
        return bool(_over(self._collector.loop).get("left"))

    def move_on(self, *, is_last: bool) -> None:
        """A resumed run begins after that epoch, which may be the last one: so do the loaders that had ended theirs."""
        self._loaders.move_on(_over(self._collector.loop).get("move_on") or (), is_last=is_last)


def _over(loop: Mapping[str, Any]) -> Mapping[str, Any]:
    found = loop.get(OVER)
    return found if isinstance(found, Mapping) else {}
