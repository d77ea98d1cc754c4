"""Makes the replays of CUDA graphs visible.

A replay runs kernels that were captured before, and no code of torch: version counters of what it changes stand still,
and no hook of an optimizer runs. A graph of a whole step (forward, backward and update) would look as if nothing had
been updated while gradients are there: an accumulation window without an end, in which no job stops.

What a graph changes is found out by looking. Before and after some of its replays (the first three, and those whose
number is a power of two) the bytes of the job's tensors are summed up. A graph that has once changed a parameter or a
tensor of an optimizer's state is an update: from then on each of its replays passes the update gate. What it has been
seen to change gets its version counter moved at each replay, as outside of a graph.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.extra_state import sums_of
from mindx_elastic.capture.update_gate import UpdateGate

__all__ = ["GraphReplays", "is_capturing"]

_FIRST_LOOKS = 3


def is_capturing() -> bool:
    """Whether what this thread computes goes into a CUDA graph, in which nothing can be read from the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass
class _Graph:
    """What is known of one."""

    num_replays: int = 0
    updates: bool = False
    """It changes parameters or optimizer state."""
    changed: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    """The tensors that it has been seen to change, by id."""


class GraphReplays:
    """One per entered guard. `watch` and `unwatch`: training thread. Replays may come from autograd's threads."""

    def __init__(self, collector: Collector, gate: UpdateGate, graphs: type[Any] = torch.cuda.CUDAGraph) -> None:
        """`graphs`: the class whose ``replay`` it is."""
        self._collector, self._gate, self._class = collector, gate, graphs
        self._graphs: weakref.WeakKeyDictionary[Any, _Graph] = weakref.WeakKeyDictionary()
        self._original: Any = None
        self._instead: Any = None

    def watch(self) -> None:
        """See replays from here on, until `unwatch`."""
        original = self._original = self._class.replay

        @functools.wraps(original)
        def replay(graph: Any) -> None:
            if self._instead is None:
                original(graph)
            else:
                self._replay(graph, self._graphs.setdefault(graph, _Graph()))

        self._instead = self._class.replay = replay

    def unwatch(self) -> None:
        # Another guard that was entered later, and is not left yet, goes on to call ours.
        if self._class.replay is self._instead:
            self._class.replay = self._original
        self._instead = None

    def _replay(self, graph: Any, known: _Graph) -> None:
        known.num_replays = number = known.num_replays + 1
        if number <= _FIRST_LOOKS or number & (number - 1) == 0:
            self._look(graph, known)
        elif known.updates:
            self._gate.begin_update()
            self._original(graph)
            _move_versions(known)
            self._gate.end_update()
        else:
            self._original(graph)
            _move_versions(known)

    def _look(self, graph: Any, known: _Graph) -> None:
        """Replay it, and compare. The devices are told first that it may be an update."""
        self._collector.devices.wait_for_update()  # a look waits for the device
        self._gate.on_update(None)
        stable, others = self._collector.stable_tensors(), self._collector.other_tensors()
        with self._gate.perhaps_updating():
            before = sums_of([*stable, *others])
            self._original(graph)
            after = sums_of([*stable, *others])
            for number, (tensor, *sums) in enumerate(zip([*stable, *others], before, after, strict=True)):
                if sums[0] != sums[1]:
                    known.changed[id(tensor)] = weakref.ref(tensor)
                    known.updates |= number < len(stable)
            _move_versions(known)
        if known.updates:
            self._gate.begin_update()
            self._gate.end_update()


def _move_versions(known: _Graph) -> None:
    """After a replay. Only of what it changes: of anything else a backward may still be to come."""
    for reference in known.changed.values():
        if (tensor := reference()) is not None:
            increment_version(tensor)
