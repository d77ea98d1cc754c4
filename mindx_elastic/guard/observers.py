"""What looks at a guard's steps: `prove` answers for this port, and the guard imports nothing of it.

The *overlap*: a job that stops makes one update more than it saves, which the next start is compared with. What looks
at the steps, plays that one on, compares, and rehearses a resume is `prove.play_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from mindx_elastic.config import RankInfo
from mindx_elastic.core.ports import ask
from mindx_elastic.core.position import Position

__all__ = ["Observers", "Overlap", "Proof", "observers"]


class Proof(Protocol):
    """The proof of a run under `mindx-elastic prove` or `drill`, which has its own files."""

    def redirected(self, wanted: Sequence[Path]) -> list[Path]:
        """Private folders in place of the directories that the program names."""

    def redirected_file(self, path: Path) -> Path:
        """A private place for a file that the program names."""


class Overlap(Protocol):
    """One per entered guard. Training thread."""

    scalars: Mapping[str, Any]
    """What the program has given to the step's `step_end`."""
    is_playing: bool
    """The step that is made now is played on."""
    is_at_tail: bool
    """The last boundary was reached after the code that follows its epoch."""
    looks: bool
    """`at_boundary` has something to do."""

    def at_boundary(self, position: Position, *, is_cut: bool, loss: object) -> None:
        """A step has ended, or the code after an epoch (`is_at_tail`). `is_cut`: with a boundary; not inside an
        accumulation window. `loss`: as the program gave it. Raises GracefulExit where the step was played on, but
        inside an accumulation window; ResumeDiffersError."""

    def behind_tail(self) -> None:
        """The code after an epoch has run since `at_boundary`, and the boundary has what it has changed."""

    def copy(self) -> None:
        """Copy the small state at a boundary that is played on; nothing else is kept."""

    def way_out(self, error: BaseException | None) -> BaseException | None:
        """What leaves the block in place of `error` (None: it has ended by itself): the stop's exit, whatever has
        happened in a step that is played on."""

    def leave(self, outcome: str, notes: Sequence[str]) -> None:
        """The block is over. `outcome`: ``finished``, or the exception's class. `notes`: what the guard knows against
        an exact resume."""


class Observers(Protocol):
    """What the module has that answers for the port ``observers``."""

    open_overlap: Callable[..., Overlap]
    """See `prove.play_on.Overlap`, whose arguments it takes: the state is back."""

    def open_proof(self, ranks: RankInfo) -> Proof | None:
        """None: this is an ordinary run."""

    Variables: Callable[..., Any]
    """See `prove.variables.Variables`."""


def observers() -> Observers:
    """Loads them when first asked."""
    return cast(Observers, ask("observers"))
