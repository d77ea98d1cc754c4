"""What a member needs of its guard while that is open."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.memory.memory import Memory
from mindx_elastic.rejoin import groups, nccl
from mindx_elastic.rejoin.before_call import ObjectsBeforeCall
from mindx_elastic.rejoin.failures import RejoinFailed
from mindx_elastic.rejoin.protocol import Report

if TYPE_CHECKING:
    from mindx_elastic.guard.saver import Saver

__all__ = ["HAS_HOOK", "PARTS_DIFFER", "Host"]

HAS_HOOK = "DDP has a communication hook, which a new process would call alone when it lays out its buckets"
PARTS_DIFFER = "the ranks hold different parts of the state, so a dead one takes its part with it"


class Host:
    """One per entered guard."""

    def __init__(
        self,
        saver: Saver,
        memory: Memory | None,
        gate: UpdateGate,
        step_gate: StepGate,
        watcher: Watcher,
        ddp: groups.DdpModules,
        objects: ObjectsBeforeCall,
        *,
        is_stopping: Callable[[], bool],
        peers_gone_soon: Callable[[], bool],
        end: Callable[[str], NoReturn],
    ) -> None:
        """`memory`: the rank's shared memory; None: there is none. `peers_gone_soon`: after a failed collective,
        whether another rank is gone, or will be in a moment. `end`: ends this process, because of what the text says,
        without a save and without a word to the others."""
        self._saver, self._collector, self._memory, self._objects = saver, saver.collector, memory, objects
        self._gate, self._step_gate, self._watcher = gate, step_gate, watcher
        self.is_stopping, self.peers_gone_soon, self.end = is_stopping, peers_gone_soon, end
        self.ddp = ddp

    def report(self) -> Report:
        saver, collector, rank = self._saver, self._collector, self._saver.ranks.rank
        self._gate.give_up()
        problem_of_devices = groups.devices.wait_aborted()
        if groups.devices.is_used and not problem_of_devices and (broken := nccl.broken_context()):
            nccl.end_process(broken)  # before it has reported: a new process takes its place
        if self._memory is not None:
            self._memory.finish_copy()
        with self._gate.hold(0.0) as problem:
            return Report(
                rank=rank,
                run_id=saver.events.run_id,
                attempt=saver.events.attempt,
                step=collector.position.step,
                clean=problem is None,
                groups=groups.digest(),
                orders=collector.gradient_order,
                lacked=saver.lacked,
                problem=problem_of_devices or self._problem() or self._objects.problem,
            )

    def _problem(self) -> str:
        """Why the ranks cannot go on in place from one boundary; empty: they can."""
        if self._collector.compiled.any:
            return "torch.compile has compiled part of the training, and only a restart compiles it the same again"
        if not self._saver.replicated:
            return PARTS_DIFFER
        if any(module._comm_hooks for _, module in self.ddp):
            return HAS_HOOK
        return ""

    def live(self) -> tuple[Mapping[str, Any], Any]:
        """The state of the last boundary, and its header facts. The update gate is held."""
        return self._collector.state(), self._saver.describe("snapshot")

    def donate(self) -> Path:
        """Put the last boundary into shared memory; returns the file. Raises RejoinFailed."""
        path = None if self._memory is None else self._memory.donate()
        if path is None:
            raise RejoinFailed("the donor's state does not fit into shared memory")
        return path

    def call_soon(self, seconds: float, work: Callable[[], None]) -> None:
        """Run a function in the watcher thread after so many seconds."""
        self._watcher.call_at(time.monotonic() + seconds, work)

    def open_gate(self) -> None:
        """Let the training thread come out at its next boundary."""
        self._step_gate.close()
        self._step_gate.open_until(0)

    def orders(self) -> Mapping[str, list[int]]:
        """The order in which the gradients of each of `ddp` arrive; empty where one is not known yet, or cannot be."""
        orders = self._collector.gradient_order
        return orders if self.ddp and all(orders.get(name) for name, _ in self.ddp) else {}
