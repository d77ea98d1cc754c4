"""What a platform tells a start, and is told of it: its port is `start.ports.Platform`.

Before: the report on faults, whether a file on groups is wanted, the flags that have stopped the job before. After: the
strategy, the plan and the groups as files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.config import FaultPaths, RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import MindxError
from mindx_elastic.platforms.faults import Faults, default_fault_sources, merge, read_faults
from mindx_elastic.platforms.flag_file import AnsweredFlags
from mindx_elastic.start.facts import KnownFaults, ResumePlan
from mindx_elastic.start.start import STRATEGY_FILE

__all__ = ["AnsweredFlagsPart", "FaultsPart", "GroupInfoPart", "PlatformAtStart"]


class PlatformAtStart:
    """One a start. Main thread."""

    def __init__(self, ranks: RankInfo, flags: AnsweredFlags) -> None:
        """`flags`: learns the flags that have stopped the job before."""
        self._faults, self._groups, self._flags = FaultsPart(), GroupInfoPart(ranks), AnsweredFlagsPart(flags)

    @property
    def faults(self) -> KnownFaults:
        return self._faults.known

    @property
    def wants_strategy(self) -> bool:
        return self._groups.is_wanted_somewhere

    def parts(self) -> list[Part]:
        return [self._faults, self._groups]

    def last_parts(self, flags: Sequence[str]) -> list[Part]:
        self._flags.own = flags
        return [self._flags]

    def write_plan(self, directory: Path, strategy: Strategy, plan: ResumePlan | None) -> None:
        # Only the rank that writes them pays for importing protobuf.
        try:
            from mindx_elastic.platforms.plan_files import PLAN_JSON, write_plan
            from mindx_elastic.platforms.strategy_file import save_strategy

            # A start script must not take the plan of an earlier start for this one's.
            (directory / PLAN_JSON).unlink(missing_ok=True)
            save_strategy(directory / STRATEGY_FILE, strategy)
            if plan is not None:
                write_plan(directory, plan)
        except (MindxError, OSError, ImportError) as error:
            logger.warning("the strategy and the plan cannot be written to %s: %s", directory, error)

    def write_groups(self, layouts: Callable[[], Strategy]) -> None:
        if self._groups.is_wanted:
            self._groups.write(layouts())


class FaultsPart(Part):
    """The platform's fault report, made the same on every rank: two nodes may see different versions of the file. A
    report that cannot be used is logged and ignored."""

    name = "faults"

    def __init__(self) -> None:
        self._own = _read_faults()
        self.known = KnownFaults()

    def say(self) -> Any:
        return [sorted(self._own.ranks), self._own.created]

    def merge(self, said: Sequence[Any]) -> Merged:
        created = [float(stamp) for named, stamp in said if named and stamp is not None]
        return Merged([sorted({int(rank) for named, _ in said for rank in named}), max(created, default=None)])

    def hear(self, answer: Answer) -> None:
        named, created = answer.common
        self.known = KnownFaults.of({int(rank) for rank in named}, None if created is None else float(created))


class GroupInfoPart(Part):
    """Where each rank writes its group info file, if ``GROUP_INFO_FILE`` asks for one. Ranks that have the same path
    from their launcher write one file each."""

    name = "group_info"

    def __init__(self, ranks: RankInfo) -> None:
        wanted = os.environ.get("GROUP_INFO_FILE", "").strip()
        self._rank, self._wanted, self._is_shared = ranks.rank, wanted, False
        self.is_wanted_somewhere = False
        """On rank 0: some rank writes one."""

    def say(self) -> Any:
        return os.path.abspath(self._wanted) if self._wanted else ""

    def merge(self, said: Sequence[Any]) -> Merged:
        counts = Counter(map(str, said))
        self.is_wanted_somewhere = any(said)
        return Merged(None, [bool(path) and counts[path] > 1 for path in said])

    def hear(self, answer: Answer) -> None:
        self._is_shared = bool(answer.own)

    @property
    def is_wanted(self) -> bool:
        """This rank writes one."""
        return bool(self._wanted)

    def write(self, strategy: Strategy) -> None:
        """Write this rank's file. A failure is only logged: training does not depend on it."""
        path = Path(self._wanted)
        if self._is_shared:
            path = path.parent / f"rank_{self._rank}" / path.name
        try:
            from mindx_elastic.platforms.group_info import write_group_info_file

            write_group_info_file(strategy, self._rank, path)
        except (MindxError, OSError, ImportError) as error:
            logger.warning("GROUP_INFO_FILE=%s cannot be written: %s", path, error)


class AnsweredFlagsPart(Part):
    """The flags that have stopped the job before, according to the checkpoints of all ranks."""

    name = "flags"

    def __init__(self, flags: AnsweredFlags) -> None:
        self._flags = flags
        self.own: Sequence[str] = ()
        """The flags in this rank's file."""

    def say(self) -> Any:
        return list(self.own)

    def merge(self, said: Sequence[Any]) -> Merged:
        return Merged(list(dict.fromkeys(str(flag) for each in said for flag in each)))

    def hear(self, answer: Answer) -> None:
        self._flags.take_over([str(flag) for flag in answer.common])


def _read_faults() -> Faults:
    found = Faults()
    for source in default_fault_sources(FaultPaths.from_env()):
        try:
            found = merge(found, read_faults(source, world_size=None))
        except MindxError as error:
            logger.warning("%s; the plan for this start is made without it", error)
    return found
