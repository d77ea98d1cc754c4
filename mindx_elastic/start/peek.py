"""`mindx_elastic.peek`: what a start in a directory would go on from, asked without a guard."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from mindx_elastic.config import MemorySettings
from mindx_elastic.core.certificate import proof_of
from mindx_elastic.errors import MismatchError, NoUsableCheckpointError, UsageError
from mindx_elastic.memory.folders import job_folder
from mindx_elastic.start.facts import Refusal, World
from mindx_elastic.start.findings import list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory
from mindx_elastic.start.planner import newest_world_size
from mindx_elastic.start.unused_state import never_saved

__all__ = ["Peek", "peek"]

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Peek:
    """What the next start would go on from, as far as the headers of the files tell."""

    step: int
    """Boundaries passed since the job's very first start, as `Guard.step`."""
    epoch: int
    """From 1; 0 before the first."""
    step_in_epoch: int
    """From 1; 0 before the first."""
    reason: str
    """Why it was saved, for people: "SIGTERM", "periodic", "the end of the training", ..."""
    saved_at: datetime
    """When its newest file was written; UTC."""
    exact: bool | None
    """True: proved, a resume of this job was compared with the process before and was equal, and nothing is known
    against it. None: not proved yet. False: no."""
    proof: str
    """The same in words: ``proved: step 13 (2 ranks, 2026-11-29)``, ``not proved yet: ...``, ``no: ...``."""
    inexact_because: tuple[str, ...]
    """What is known against it."""
    world_size: int
    """The ranks that wrote it."""
    paths: tuple[Path, ...]
    """The file of each new rank, in order: on disk, or a snapshot in shared memory."""
    rejected: tuple[str, ...]
    """What was looked at and is not used, with the reason: torn files, steps that are not complete."""


def peek(directory: str | os.PathLike[str], *, world_size: int | None = None) -> Peek | None:
    """What a start would go on from in `directory`; None where it would be a fresh start.

    ::

        found = mx.peek("ckpt")
        if found is not None:
            print(f"going on at step {found.step}, epoch {found.epoch}")

    Reads headers, of the files there and of snapshots in this machine's shared memory, and plans as a start does; loads
    and changes nothing. The start reads the tensors as well, so it may find damage that no header shows, and take an
    older step; ``mindx-elastic plan`` reads them, too. While a job runs there, the answer is as of now.

    Args:
        directory: as of `Guard`; it need not exist.
        world_size: the ranks of the start; None: as many as wrote what is there.

    Raises, as the start would: NoUsableCheckpointError when there are checkpoints and none can be used, with a line for
    each; MismatchError when those of another world size cannot be spread over this one. UsageError for a `directory`
    that is a file. Any thread; no other process need run.
    """
    given = Path(directory)
    if given.exists() and not given.is_dir():
        raise UsageError(f"peek({str(directory)!r}): this is a file; give the checkpoint directory")
    place = given.resolve()
    base = MemorySettings.from_env().base
    listing = list_files([place], None if base is None else job_folder(base, place))
    trust = reader_trust(place)
    inventory = Inventory.merge([scan(listing, trust=trust)] if place.is_dir() else [])
    plan = inventory.plan(World(world_size or newest_world_size(inventory.facts) or 1))
    if isinstance(plan, Refusal):
        if not inventory.anything or inventory.was_never_complete(never_saved([place], trust)):
            return None
        reasons = "; ".join(inventory.lines(None, plan.reasons)[:_SHOWN])
        if plan.other_worlds and world_size is not None:
            sizes = ", ".join(map(str, plan.other_worlds))
            raise MismatchError(
                f"the checkpoints in {directory} were written by {sizes} ranks and cannot be spread over {world_size}: "
                f"{reasons}",
                path=place,
            )
        raise NoUsableCheckpointError(
            f"{directory} holds checkpoint files and none can be resumed from: "
            f"{reasons or 'they are in quarantine, or not meant for resuming'}",
            path=place,
        )
    files = [share.file for share in plan.ranks]
    infos = [entry.info for file in files if (entry := inventory.entries.get(file.path)) and entry.info is not None]
    against = (*plan.inexact, *plan.unmanaged)
    proof = proof_of([info.certificate for info in infos], against)
    return Peek(
        step=plan.step,
        epoch=plan.epoch,
        step_in_epoch=plan.step_in_epoch,
        reason="; ".join(dict.fromkeys(info.reason for info in infos)),
        saved_at=datetime.fromtimestamp(max(file.created for file in files), timezone.utc),
        exact=proof.exact,
        proof=proof.words,
        inexact_because=against,
        world_size=plan.source.world_size,
        paths=tuple(Path(file.path) for file in files),
        rejected=tuple(inventory.lines(plan.moment, plan.rejected)),
    )
