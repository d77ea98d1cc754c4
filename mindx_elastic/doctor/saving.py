"""Whether the state gets to the disk before a stopping process must be gone, and whether there is room for it there and
in shared memory. Pure.

What the ranks of one machine write at a stop, with a state of S bytes that each of N ranks holds alike (DDP):

- at an agreed stop each part is in two files (`core.division`): 2 x S from two ranks on, S with one rank;
- where they cannot agree, because a rank is dead, each writes all it has: N x S.

Ranks that hold different parts (FSDP) write S together in any case, S being the sum of their parts.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from mindx_elastic.core.printable import human_size

__all__ = ["Disk", "Finding", "HeldState", "Level", "judge_memory", "judge_room", "judge_time"]

_AGREEMENT_S = 1.0
"""Time from the alarm to the agreed step, with room for a step that has begun, and for the file's name; steps take
longer in some jobs."""
_KEPT_FREE = 2
"""A new checkpoint is written before the older one is deleted."""
_NUM_SLOTS = 2


class Level(Enum):
    """How much a finding matters, the most harmless first."""

    GOOD = "good"
    WARNING = "warning"
    """The job runs; time, steps or exactness may be lost in some case."""
    PROBLEM = "problem"
    """The job does not run, or loses what it need not lose."""


class Finding(NamedTuple):
    check: str
    """What was looked at, in a word or two; several findings may have the same."""
    level: Level
    text: str
    remedy: str = ""
    """What to do; empty where there is nothing to do."""


class HeldState(NamedTuple):
    """What the ranks of this machine hold."""

    nbytes: int
    """What several ranks hold alike counted once."""
    ranks: int = 1
    """Ranks of this machine that each hold all of it; 1 where each holds a part."""

    @property
    def agreed_bytes(self) -> int:
        """Written at an agreed stop."""
        return self.nbytes * min(self.ranks, 2)

    @property
    def alone_bytes(self) -> int:
        """Written where each rank acts alone."""
        return self.nbytes * self.ranks


class Disk(NamedTuple):
    """What was measured on the file system of the checkpoint directory."""

    bytes_per_s: float
    """Speed of a save: write, digests and flush."""
    measured_bytes: int
    way: str
    """How, for a person."""


def judge_time(disk: Disk, state: HeldState | None, grace_s: float) -> Finding:
    """Whether the grace period is long enough for the save."""
    written = f"{disk.way}, digests and flush included, {human_size(disk.measured_bytes)} written"
    speed = f"{human_size(disk.bytes_per_s)}/s ({written})"
    left_s = max(0.0, grace_s - _AGREEMENT_S)
    if state is None:
        text = f"{speed}: {human_size(disk.bytes_per_s * left_s)} fit into {grace_s:g} s of grace"
        return Finding("disk speed", Level.GOOD, text)
    need_s, alone_s = (nbytes / disk.bytes_per_s for nbytes in (state.agreed_bytes, state.alone_bytes))
    text = f"{speed}: {human_size(state.agreed_bytes)} need {need_s:.1f} s of your {grace_s:g} s of grace"
    least = _rounded_up(2 * need_s + _AGREEMENT_S)
    remedy = (
        f"give more time: --grace {least} (MINDX_GRACE_S={least}), and the platform as long (Kubernetes: "
        "terminationGracePeriodSeconds); or a faster disk"
    )
    level = Level.GOOD
    if need_s > left_s:
        level, text = Level.PROBLEM, f"{text}: the process is killed before the state is saved"
    elif need_s > left_s / 2:
        what = "a step in progress, or other jobs on the same disk, may take the rest"
        level, text = Level.WARNING, f"{text}: {what}"
    elif alone_s > left_s:
        level, remedy = Level.WARNING, "more grace, or run under mindx-elastic run with snapshots"
        text += (
            f"; but {state.ranks} ranks that cannot agree (one of them is dead) write "
            f"{human_size(state.alone_bytes)}, which takes {alone_s:.1f} s"
        )
    return Finding("disk speed", level, text, remedy if level is not Level.GOOD else "")


def judge_room(free_bytes: int, state: HeldState | None, where: str) -> Finding:
    """Whether there is room for the next checkpoints. `where`: the file system, for a person."""
    text = f"{human_size(free_bytes)} free in {where}"
    if state is None:
        return Finding("disk space", Level.GOOD, text)
    need, wanted = state.agreed_bytes, max(_KEPT_FREE * state.agreed_bytes, state.alone_bytes)
    text += f"; one checkpoint takes {human_size(need)}"
    remedy = (
        f"have {human_size(wanted)} free: make room, keep fewer checkpoints (keep_checkpoint_max), or another directory"
    )
    if free_bytes < need:
        return Finding("disk space", Level.PROBLEM, f"{text}: a stop cannot save", remedy)
    if free_bytes < wanted:
        why = "the older one goes only after the new one is complete"
        return Finding("disk space", Level.WARNING, f"{text}, {why}, and ranks that cannot agree write more", remedy)
    return Finding("disk space", Level.GOOD, text)


def judge_memory(name: str, free_bytes: int, state: HeldState | None, limit_left: int | None) -> Finding:
    """Whether the snapshots of `state` fit into shared memory. `limit_left`: bytes of memory that the machine and the
    limit of its container leave; None: it cannot be seen."""
    room = free_bytes if limit_left is None else min(free_bytes, limit_left)
    text = f"{human_size(room)} of memory free in {name}"
    if state is None:
        return Finding("shared memory", Level.GOOD, text)
    need = _NUM_SLOTS * state.nbytes
    size = max(1, -(-int(need * 1.1) // (1 << 30)))
    remedy = (
        f"docker run --shm-size={size}g; Kubernetes: an emptyDir with medium: Memory and sizeLimit: {size}Gi at "
        "/dev/shm, which counts in the container's memory limit"
    )
    text += f"; two snapshots of {human_size(state.nbytes)} take {human_size(need)}"
    if room < need:
        why = "a killed process then loses all steps since the last checkpoint"
        return Finding("shared memory", Level.PROBLEM, f"{text}: {why}", remedy)
    if room < need * 1.1:
        why = "hardly anything is left for loader workers"
        return Finding("shared memory", Level.WARNING, f"{text}: {why}", remedy)
    return Finding("shared memory", Level.GOOD, text)


def _rounded_up(value_s: float) -> int:
    """To a number that people give: 5, 10, 15 ..."""
    return max(5, -(-int(value_s + 0.999) // 5) * 5)
