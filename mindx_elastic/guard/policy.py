"""What callbacks and users ask of the guard: when to save, under which name, and how to leave.

A policy only decides. The guard has the handlers, the capture and the files, so callbacks do not compete for a signal
and there is one save path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mindx_elastic.alarm.alarm import ALARM_KINDS, REHEARSAL, Alarm
from mindx_elastic.config import RankInfo
from mindx_elastic.core.position import Position
from mindx_elastic.errors import UsageError

__all__ = [
    "ExitPolicy",
    "PeriodicPolicy",
    "breakpoint_name",
    "breakpoint_policy",
    "check_policies",
    "exit_codes_of",
    "final_name",
    "job_names",
    "keep_consistent",
    "policies_for",
]

_LONGEST_NAME = 180  # file systems take 255 bytes; epoch, step and the temporary suffix come on top


def breakpoint_name(prefix: str) -> Callable[[Position], str]:
    """The documented name of a dying-gasp checkpoint: ``{prefix}-{epoch}_{step_in_epoch}_breakpoint.safetensors``."""
    return lambda position: f"{prefix}-{position.epoch}_{position.step_in_epoch}_breakpoint.safetensors"


def final_name(prefix: str) -> Callable[[Position], str]:
    """The name of what a finished training leaves: ``{prefix}-{epoch}_{step_in_epoch}_final.safetensors``."""
    return lambda position: f"{prefix}-{position.epoch}_{position.step_in_epoch}_final.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExitPolicy:
    """What to save, and where, when the job must stop."""

    kind: str
    """``breakpoint``, ``ttp`` or ``request_exit``; written into the file's header."""
    alarms: frozenset[str]
    """Which of `ALARM_KINDS` this policy answers to."""
    name: Callable[[Position], str]
    """File name (no folder) for the boundary that is saved."""
    directory: Path
    """Where the file goes; with more than one rank inside ``rank_{r}/``."""
    signals: tuple[int, ...] = ()
    """Signal numbers to listen to; only with ``"signal"`` in `alarms`."""
    flag_file: Path | None = None
    """JSON file ``{"GracefulExit": 1}`` to watch; only with ``"flag"`` in `alarms`."""
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    """Exit code by alarm kind, instead of the one that `alarm.exit_codes` gives."""
    append_info: Sequence[object] = ()
    """JSON-able values of the user, written into the header."""
    prefix: str = ""
    """The user's name for this job's files; tells them from another job's in the same directory. Empty: none."""
    save: bool = True
    """False: stop gracefully without a checkpoint of this policy."""
    after_save: Callable[[float], None] | None = None
    """Called in the training thread once the checkpoint is durable, with the `time.monotonic` deadline in seconds.
    An exception there is a warning."""

    place: Callable[[Path, Position, RankInfo], Path] | None = None
    """Gives the whole path of the file, below the directory (resolved, first argument), where that is not ``{name}`` or
    ``rank_{r}/{name}`` in it."""
    finish: Callable[[Path, RankInfo, Callable[[], Collection[int]], float], Path] | None = None
    """Called with the durable file, the ranks, a function that gives the ranks known to be dead, and the seconds it may
    take, in the thread that saves; returns where the file is afterwards. An OSError there is a warning."""
    final_name: Callable[[Position], str] | None = None
    """File name (no folder) for the last boundary of a training that ended by itself; None: this policy keeps none."""
    remove_redundancy: bool = False
    """At the end of a training ranks that hold the same write each part once, not each all. See `divided_saves`."""
    needs_replica: bool = False
    """Refuse to save when a rank is gone and no other rank holds the same state: see `keep_consistent`."""

    def __post_init__(self) -> None:
        unknown = self.alarms - ALARM_KINDS
        if unknown or not self.alarms:
            raise UsageError(f"unknown or no alarm kinds {sorted(unknown)}; choose from {sorted(ALARM_KINDS)}")


def check_policies(policies: Sequence[ExitPolicy | PeriodicPolicy]) -> None:
    """Find mistakes that would make a save fail later. Raises UsageError: a name with a folder, `append_info` that is
    not JSON."""
    for policy in policies:
        final = policy.final_name(Position()) if isinstance(policy, ExitPolicy) and policy.final_name else ""
        name = max(policy.name(Position()), final, key=len)
        if len(name.encode()) > _LONGEST_NAME:
            raise UsageError(
                f"the checkpoint name {name[:40]}... is {len(name)} characters long; give a shorter prefix"
            )
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UsageError(
                f"the checkpoint name {name!r} (from prefix or file_name) must be a plain file name without a folder; "
                "put the folder into directory"
            )
        try:
            json.dumps(list(policy.append_info))
        except (TypeError, ValueError) as error:
            raise UsageError(f"append_info={policy.append_info!r} cannot be written as JSON: {error}") from None


def policies_for(policies: Sequence[ExitPolicy], alarm: Alarm) -> list[ExitPolicy]:
    """The policies that want a save after `alarm`, or at least a graceful stop."""

    def answers(policy: ExitPolicy) -> bool:
        if alarm.signum is not None and policy.signals and alarm.signum not in policy.signals:
            return False
        return ("signal" if alarm.kind == REHEARSAL else alarm.kind) in policy.alarms

    return [policy for policy in policies if answers(policy)]


def exit_codes_of(policies: Sequence[ExitPolicy]) -> dict[str, int]:
    """The exit codes that policies ask for, by alarm kind; the first policy with one wins."""
    codes: dict[str, int] = {}
    for policy in policies:
        for kind, code in policy.exit_codes.items():
            if kind in policy.alarms:
                codes.setdefault(kind, code)
    return codes


def keep_consistent(policies: Sequence[ExitPolicy], kind: str, *, replicated: bool) -> list[ExitPolicy]:
    """The policies that may save after an alarm of `kind`.

    After a ``peer`` alarm a rank and its part of the state are gone, unless the ranks are replicas of each other
    (`replicated`): a policy with `needs_replica` then saves nothing.
    """
    return [policy for policy in policies if replicated or kind != "peer" or not policy.needs_replica]


def breakpoint_policy(
    prefix: str,
    directory: Path,
    alarms: frozenset[str],
    signals: Sequence[int],
    *,
    keeps_end: bool = True,
    **more: Any,
) -> ExitPolicy:
    """A breakpoint checkpoint for `alarms`, and the end of the training where it `keeps_end`. `more`: other fields."""
    if isinstance(signals, (int, str)) or not all(isinstance(number, int) for number in signals):
        raise UsageError(f"signals={signals!r}: give a list of signal numbers, for example [signal.SIGTERM]")
    return ExitPolicy(
        kind="breakpoint",
        alarms=alarms,
        name=breakpoint_name(prefix),
        directory=directory,
        signals=tuple(signals) if "signal" in alarms else (),
        final_name=final_name(prefix) if keeps_end else None,
        prefix=prefix,
        **more,
    )


def job_names(prefix: str, policies: Sequence[ExitPolicy | PeriodicPolicy]) -> tuple[str, ...]:
    """The prefixes of a job's files: the guard's own and those of its callbacks. Written into every header."""
    names = (getattr(policy, "prefix", "") for policy in policies)
    return tuple(sorted({prefix, *(name for name in names if isinstance(name, str) and name)}))


class PeriodicPolicy(Protocol):
    """When to save during training, and where. Called in the training thread right after a boundary."""

    directory: Path
    asynchronous: bool
    keep_max: int | None
    keep_per_n_minutes: float | None
    append_info: Sequence[object]

    def due(self, position: Position) -> bool:
        """Whether the boundary `position` is to be saved. Must give the same answer on every rank."""
        ...

    def name(self, position: Position) -> str:
        """File name, no folder."""
        ...
