"""What killed processes have left in shared memory, made without killing any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindx_elastic.core.events import EventLog
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.boundaries import BoundaryRing
from mindx_elastic.memory.folders import job_folder
from mindx_elastic.memory.snapshots import copy_snapshot, lay_out, seal_slot
from mindx_elastic.persist.packer import StatePacker
from tests.checkpoint_files import STATE, info_of

RUN = "run-a"
HOLD_ARENA = """
import sys
from pathlib import Path
from mindx_elastic.memory.arena import RankArena
arena = RankArena(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
print("held", flush=True)
sys.stdin.read()
"""
"""A program that holds a rank's arena: base, checkpoint directory, rank."""


class Machine:
    """One machine's shared memory, and the checkpoint directory `directory`."""

    def __init__(self, folder: Path, world_size: int = 1) -> None:
        self.base, self.directory, self.world_size = folder / "shm", folder / "ckpt", world_size
        for path in (self.base, self.directory):
            path.mkdir()
        self.job = job_folder(self.base, self.directory)

    def know(self, *runs: str) -> None:
        """Make the directory's event log speak of these runs."""
        for run in runs:
            events = EventLog(self.directory / "events.jsonl")
            events.run_id = run
            events.emit("start", step=0, outcome="fresh")

    def arena(self, rank: int) -> RankArena:
        return RankArena(self.base, self.directory, rank)

    def snapshot(
        self,
        step: int,
        *,
        ranks: Iterable[int] | None = None,
        sealed: bool = True,
        layout: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """A snapshot of this step in each rank's older slot. `layout`: the record, less the rank."""
        for rank in range(self.world_size) if ranks is None else ranks:
            arena = self.arena(rank)
            record = None if layout is None else {**layout, "rank": rank}
            facts = {"world_size": self.world_size, "rank": rank, "kind": "snapshot", **fields}
            snapshot = lay_out(STATE, info_of(step, **facts), record)
            index = copy_snapshot(arena, snapshot, arena.newest().sequence + 1, at=lambda stage: None)
            assert index is not None and (not sealed or seal_slot(arena, index))
            arena.close()

    def boundary(
        self, rank: int, step: int, *, run: str = RUN, attempt: int = 0, forecast: bool = False, trusted: bool = True
    ) -> None:
        """A record in the rank's boundary ring."""
        arena = self.arena(rank)
        ring = BoundaryRing(arena.folder / "boundaries", run, 4096)
        content = StatePacker("plain").pack({"rng": {"of": rank, "step": step}, "buffers": {}})
        assert ring.write(attempt, step, content, forecast=forecast, trusted=trusted)
        ring.close()
        arena.close()

    def slots(self, rank: int) -> list[Path]:
        return sorted((self.job / f"rank_{rank}").glob("slot_*"))
