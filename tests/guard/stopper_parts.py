"""A stopper with everything around it, for tests that play the watcher and the training thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.position import Position
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.guard.last_resort import LastResort
from mindx_elastic.guard.policy import ExitPolicy, breakpoint_name
from mindx_elastic.guard.process_end import LogRelay
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.persist.format import read_header

__all__ = ["Parts", "Timers"]


class Timers(Watcher):
    """For what is ordered for later the time does not come."""

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        pass


class Parts:
    """A stopper with everything around it, and no guard: the test plays watcher and training thread."""

    def __init__(
        self,
        directory: Path,
        *,
        grace_s: float = 30.0,
        exchange: Exchange | None = None,
        member: Any = None,
        page: StatusPage | None = None,
        **policy: Any,
    ) -> None:
        """`policy`: fields of the only one."""
        self.directory = directory
        self.gate, self.steps = UpdateGate(), StepGate(5)
        self.collector = Collector({"model": nn.Linear(2, 2)})
        self.collector.copy(Position(step=5, epoch=1, step_in_epoch=5))
        self.events = EventLog(directory / "events.jsonl")
        self.watcher = Timers(lambda signum: None)
        self.last_resort = LastResort()
        self.durable: Path | None = None
        fields: dict[str, Any] = {
            "kind": "breakpoint",
            "alarms": frozenset({"signal", "exception", "request", "flag", "peer"}),
            "name": breakpoint_name("net"),
            "directory": directory,
        }
        self.policy = ExitPolicy(**{**fields, **policy})
        self.saver = Saver(self.collector, RankInfo(), self.events)
        if page is not None:
            self.saver.page = page
        self.stopper = Stopper(
            step_gate=self.steps,
            update_gate=self.gate,
            exchange=exchange or Exchange(),
            watcher=self.watcher,
            saver=self.saver,
            settings=Settings(grace_s=grace_s),
            policies=[self.policy],
            arm_last_resort=self.last_resort.arm,
            leave_by=self.last_resort.leave_by,
            relay=LogRelay(),
            already_durable=lambda: self.durable,
            member=member,
        )

    def reach(self, step: int) -> bool:
        """The training thread passes boundary `step`; whether it is held there."""
        self.gate.pass_boundary(lambda: self.collector.copy(Position(step=step, epoch=1, step_in_epoch=step)))
        return self.steps.arrive(step)

    def files(self) -> list[int]:
        return [read_header(path).info.step for path in self.directory.glob("*.safetensors")]
