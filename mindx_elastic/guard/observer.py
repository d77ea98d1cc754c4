"""The ports by which a guard asks what looks at its steps: it imports nothing of `prove`, which has these looks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol, cast

from mindx_elastic.config import RankInfo
from mindx_elastic.core.ports import ask

__all__ = ["Observers", "Proof", "observers"]


class Proof(Protocol):
    """The proof of a run under `mindx-elastic prove` or `drill`, which has its own files."""

    def redirected(self, wanted: Sequence[Path]) -> list[Path]:
        """Private folders in place of the directories that the program names."""

    def redirected_file(self, path: Path) -> Path:
        """A private place for a file that the program names."""


class Observers(Protocol):
    """What the module has that answers for the port ``observers``; it also has what `guard.overlap` asks for."""

    def open_proof(self, ranks: RankInfo) -> Proof | None:
        """None: this is an ordinary run."""

    def own_variables(
        self,
        frame: FrameType | None,
        kept: Collection[int],
        *,
        positions: bool = False,
        without_epoch: Collection[int] = (),
    ) -> dict[str, str]:
        """See `prove.variables.own_variables`."""


def observers() -> Observers:
    """Loads them when first asked."""
    return cast(Observers, ask("observers"))
