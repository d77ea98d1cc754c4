"""Builds the files of a step that replicas have divided among them, as their guards write it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.core.division import Division, parts_of_member
from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.strategy import LaidOut, LayoutRecord
from mindx_elastic.persist.dtypes import NAMES
from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.format import Held
from mindx_elastic.persist.writer import write_checkpoint
from tests.checkpoint_files import info_of

RUN = "run"


@dataclass(frozen=True)
class Replicas:
    """A job of `size` ranks with the same weights, and small states of their own."""

    root: Path
    size: int
    step: int = 20

    def state(self, rank: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.step)
        weights = {"a": torch.rand(7, 5, generator=generator), "b": torch.rand(11, generator=generator)}
        return {"model": {**weights, "tiny": torch.tensor(2.0)}, "rng": {"own": torch.full((3,), rank)}}

    def layout(self, rank: int) -> dict[str, Any]:
        whole = LaidOut(Layout((self.size,), (REPLICATE,)), (), False)
        return LayoutRecord(rank=rank, world_size=self.size, default=whole, modules=["model"]).json

    def division(self) -> Division:
        _, tensors = flatten(self.state(0))
        divided = {n: (NAMES[t.dtype], tuple(t.shape), t.nbytes) for n, t in tensors.items() if n[-1] in "ab"}
        return Division.of(divided, self.size)

    def write(
        self,
        rank: int,
        parts: Collection[int] | None,
        *,
        name: str = "job-1_1_breakpoint",
        sample: str = "same",
    ) -> Path:
        """The file of `rank` with these parts; None: a whole one."""
        folder = self.root / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        held = None if parts is None else Held(self.division(), tuple(sorted(parts)), sample)
        info = info_of(self.step, run_id=RUN, world_size=self.size, rank=rank, kind="breakpoint", reason="SIGTERM")
        path = folder / f"{name}.safetensors"
        write_checkpoint(path, self.state(rank), info, layout=self.layout(rank), held=held)
        return path

    def write_share(self, rank: int, copies: int, **options: Any) -> Path:
        return self.write(rank, parts_of_member(rank, self.size, copies), **options)
