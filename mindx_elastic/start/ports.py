"""What a start asks of the process around it: small ports, for which the guard and the platforms have the objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Part
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.start.facts import KnownFaults, ResumePlan
from mindx_elastic.start.findings import Archive, Transport
from mindx_elastic.start.restore import Resumed

__all__ = ["Job", "Platform", "StartConnections"]


class Job(Protocol):
    """What this rank saves as (`guard.saver.Saver`)."""

    ranks: RankInfo
    events: EventLog
    trust: Trust
    names: tuple[str, ...]
    """The prefixes of its files."""


class StartConnections(Protocol):
    """The connections of this process (`guard.connections.Connections`). Main thread."""

    exchange: Exchange
    evaluates: bool
    """The program says itself that it does not train."""

    @property
    def arenas(self) -> Path | None:
        """The job's folder in shared memory."""

    @property
    def mirror(self) -> Transport | None:
        """Carries files between nodes, once `connect` was called."""

    @property
    def archive(self) -> Archive | None:
        """The second place of the files; None: there is none."""

    def parts(self) -> list[Part]:
        """Its parts of the first meeting; then comes `connect`."""

    def connect(self) -> None: ...

    def later_parts(self) -> list[Part]:
        """Its parts of the second meeting; then comes `greet`."""

    def greet(self) -> None: ...

    def announce(self, found: Resumed | None) -> None:
        """`found` is about to be loaded, which may be what kills the process."""


class Platform(Protocol):
    """What a platform tells a start, and is told of it (`platforms.at_start.PlatformAtStart`). Main thread."""

    @property
    def faults(self) -> KnownFaults:
        """After the first meeting: its report on faults."""

    @property
    def wants_strategy(self) -> bool:
        """On rank 0, after the first meeting: some rank asks for the layouts of all ranks."""

    def parts(self) -> list[Part]:
        """Its parts of the first meeting."""

    def last_parts(self, flags: Sequence[str]) -> list[Part]:
        """Its parts of the last meeting. `flags`: of the file that this rank goes on from."""

    def write_plan(self, directory: Path, strategy: Strategy, plan: ResumePlan | None) -> None:
        """Rank 0: for people and platforms. A failure is only logged."""

    def write_groups(self, strategy: Callable[[], Strategy]) -> None:
        """This rank's file, if it wants one; as `write_plan`. `strategy`: gives the layouts of all ranks."""
