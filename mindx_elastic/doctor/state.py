"""How large the state is, and what else a start would find in a checkpoint directory that is in use already."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from mindx_elastic.core.printable import human_size, listed, printable
from mindx_elastic.doctor.finding import Finding, good, problem
from mindx_elastic.doctor.saving import HeldState
from mindx_elastic.persist.dtypes import BY_NAME
from mindx_elastic.start.findings import list_files, reader_trust, scan
from mindx_elastic.start.inventory import Inventory, SavedStep

__all__ = ["read_directory"]


def read_directory(directory: Path, ranks: int) -> tuple[HeldState | None, list[Finding]]:
    """The state of the newest step in an existing `directory`, for `ranks` ranks on this machine (0: all of them), and
    what is to be said of the files. Reads headers only. Raises OSError, UsageError."""
    inventory = Inventory.merge([scan(list_files([directory]), trust=reader_trust(directory))])
    steps = [step for step in inventory.steps if step.facts]
    newest = inventory.newest_complete() or (steps[0] if steps else None)
    state = None if newest is None else _state_of(newest, ranks)
    return state, list(_remarks(directory, inventory, newest, state))


def _state_of(step: SavedStep, ranks: int) -> HeldState:
    """What the files of `step` hold, on a machine with `ranks` of its ranks."""
    sizes: dict[int, int] = {}
    is_replicated = True
    for entry in step.entries:
        info, header = entry.info, entry.header
        if info is None or header is None or not info.resumable:
            continue
        types = header.tensor_types.values()  # all of them, where replicas have divided the state among their files
        nbytes = header.data_start + sum(math.prod(shape) * BY_NAME[dtype].itemsize for dtype, shape in types)
        sizes[info.rank] = max(sizes.get(info.rank, 0), nbytes)
        is_replicated = is_replicated and (info.world_size == 1 or info.coordinates.get("replicas") == info.world_size)
    here = ranks or step.world_size
    source = f"step {step.moment[2]}, {step.world_size} rank{'s' * (step.world_size != 1)}"
    whole = max(sizes.values()) if is_replicated else sum(sizes.values()) * here // step.world_size
    return HeldState(nbytes=whole, ranks=here, is_replicated=is_replicated, source=source)


def _remarks(
    directory: Path, inventory: Inventory, newest: SavedStep | None, state: HeldState | None
) -> Iterator[Finding]:
    if newest is not None and state is not None:
        kind = "complete" if newest.is_complete else f"not complete: {newest.why_incomplete}"
        yield good("checkpoints", printable(f"{state.source}: {kind}; a state of {human_size(state.nbytes)}"))
    entries = list(inventory.entries.values())
    if strangers := sorted({entry.owner for entry in entries if entry.owner is not None}):
        users = listed(strangers, 4)
        yield problem(
            "owners",
            f"files of other users (number {users}) are in {printable(directory)}, and are left out",
            f"if they are sound: MINDX_TRUSTED_USERS={','.join(map(str, strangers))}, or run as that user",
        )
