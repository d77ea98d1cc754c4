"""Whether the state gets to the disk before a stopping process must be gone, and whether there is room for it. Pure.

What the ranks of one machine write at a stop, with a state of S bytes that each of N ranks holds alike (DDP):

- at an agreed stop each part is in two files (`core.division`): 2 x S from two ranks on, S with one rank;
- where they cannot agree, because a rank is dead, each writes all it has: N x S.

Ranks that hold different parts (FSDP) write S together in any case, S being the sum of their parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindx_elastic.core.printable import human_size
from mindx_elastic.doctor.finding import Finding, good, problem, unknown, warning

__all__ = ["Disk", "HeldState", "judge_room", "judge_time"]

_AGREEMENT_S = 1.0
"""Time from the alarm to the agreed step, with room for a step that has begun, and for the file's name; steps take
longer in some jobs."""
_CLEARLY = 1.25
"""A setting is reported when it is so many times as fast."""
_KEPT_FREE = 2
"""A new checkpoint is written before the older one is deleted."""


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """What the ranks of this machine hold, what several hold alike counted once."""

    nbytes: int
    ranks: int = 1
    """Ranks of this machine."""
    is_replicated: bool = True
    """Each of them may hold all of it."""
    source: str = "--state"
    """Where the figure comes from, for a person."""

    @property
    def agreed_bytes(self) -> int:
        """Written at an agreed stop."""
        return self.nbytes * (min(self.ranks, 2) if self.is_replicated else 1)

    @property
    def alone_bytes(self) -> int:
        """Written where each rank acts alone."""
        return self.nbytes * (self.ranks if self.is_replicated else 1)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """What was measured on the file system of the checkpoint directory."""

    bytes_per_s: float
    """Speed of a save: write, digests and flush."""
    measured_bytes: int
    way: str
    """How, for a person."""
    other_bytes_per_s: float = 0.0
    """The same of the way that saves do not go."""
    other_setting: str = "always"
    """The value of ``MINDX_PAGE_CACHE`` for that."""


def judge_time(disk: Disk, state: HeldState | None, grace_s: float) -> Iterator[Finding]:
    """Whether the grace period is long enough for the save."""
    rate = f"{human_size(disk.bytes_per_s)}/s"
    speed = f"{rate} ({disk.way}, digests and flush included, {human_size(disk.measured_bytes)} written)"
    if disk.other_bytes_per_s > _CLEARLY * disk.bytes_per_s:
        yield warning(
            "disk speed",
            f"{rate} through {disk.way}, and {human_size(disk.other_bytes_per_s)}/s the other way",
            f"MINDX_PAGE_CACHE={disk.other_setting} makes saves go that way",
        )
    left_s = max(0.0, grace_s - _AGREEMENT_S)
    if state is None:
        text = f"{speed}: {human_size(disk.bytes_per_s * left_s)} fit into {grace_s:g} s of grace"
        yield unknown("disk speed", text, "give the size of your state (--state) or a directory with a checkpoint")
        return
    need_s, alone_s = (nbytes / disk.bytes_per_s for nbytes in (state.agreed_bytes, state.alone_bytes))
    text = f"{speed}: {human_size(state.agreed_bytes)} need {need_s:.1f} s of your {grace_s:g} s of grace"
    least = _rounded_up(2 * need_s + _AGREEMENT_S)
    remedy = (
        f"give more time: --grace {least} (MINDX_GRACE_S={least}), and the platform as long (Kubernetes: "
        "terminationGracePeriodSeconds); or a faster disk"
    )
    if need_s > left_s:
        yield problem("disk speed", f"{text}: the process is killed before the state is saved", remedy)
    elif need_s > left_s / 2:
        what = "a step in progress, or other jobs on the same disk, may take the rest"
        yield warning("disk speed", f"{text}: {what}", remedy)
    elif alone_s > left_s:
        yield warning(
            "disk speed",
            f"{text}; but {state.ranks} ranks that cannot agree (one of them is dead) write "
            f"{human_size(state.alone_bytes)}, which takes {alone_s:.1f} s",
            "more grace, or run under mindx-elastic run with snapshots: then the agent writes what memory holds",
        )
    else:
        yield good("disk speed", text)


def judge_room(free_bytes: int, state: HeldState | None, where: str) -> Finding:
    """Whether there is room for the next checkpoints. `where`: the file system, for a person."""
    if state is None:
        if free_bytes < 1 << 30:
            remedy = "make room, or give another directory"
            return warning("disk space", f"{human_size(free_bytes)} free in {where}", remedy)
        return good("disk space", f"{human_size(free_bytes)} free in {where}")
    need, wanted = state.agreed_bytes, max(_KEPT_FREE * state.agreed_bytes, state.alone_bytes)
    text = f"{human_size(free_bytes)} free in {where}; one checkpoint takes {human_size(need)}"
    remedy = (
        f"have {human_size(wanted)} free: make room, keep fewer checkpoints (keep_checkpoint_max), or another directory"
    )
    if free_bytes < need:
        return problem("disk space", f"{text}: a stop cannot save", remedy)
    if free_bytes < wanted:
        why = "the older one goes only after the new one is complete"
        return warning("disk space", f"{text}, {why}, and ranks that cannot agree write more", remedy)
    return good("disk space", text)


def _rounded_up(value_s: float) -> int:
    """To a number that people give: 5, 10, 15 ..."""
    return max(5, -(-int(value_s + 0.999) // 5) * 5)
