"""The port by which a guard knows what looks at its steps: it imports nothing of `prove`, which has these looks.

An `Observer` is there in a run of `mindx-elastic prove` or `drill`, in the steps that a stopping job plays on, and in
those that a resumed one compares with them; in all other steps there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.core.ports import ask
from mindx_elastic.core.position import Position
from mindx_elastic.guard.policy import ExitPolicy
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["KeptSteps", "NotKept", "Observed", "Observer", "Observers", "ProofObserver", "observers"]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What an observer may look at. It reads, and changes nothing."""

    directory: Path
    prefix: str
    run_id: str
    ranks: RankInfo
    targets: Mapping[str, Any]
    """The named objects."""
    collector: Collector
    position: Position
    """The last boundary passed."""
    resumed: int | None
    """Step of the checkpoint that this run went on from."""
    resumed_path: Path | None
    policies: Sequence[ExitPolicy]
    stopper: Stopper
    unmanaged: Unmanaged
    """Where a comparison notes what it has shown."""
    is_outside: Callable[[], bool]
    """What happens now belongs to no step."""


class Observer(Protocol):
    """Looks at the steps of one entered guard. Training thread only."""

    scalars: Mapping[str, Any]
    """What the program has given to the step's `step_end`."""
    is_over: bool
    """There is nothing more to look at."""
    outcome: str
    """What a comparison has found, once it is over: ``verified``, ``variables differ``, ``differs``; empty: nothing."""

    def at_boundary(self, position: Position, *, is_cut: bool) -> bool:
        """A step has ended; later halves of its boundary count nothing. `is_cut`: with a boundary; not inside an
        accumulation window. Returns whether a stop is on its way: the boundary waits for it."""

    def begin_step(self) -> None:
        """What was seen since the last boundary is part of no step."""

    def behind_tail(self) -> None:
        """The code behind an epoch has run since `at_boundary`, and the boundary has what it has changed."""

    def leave(self, outcome: str, notes: Sequence[str]) -> None:
        """The block is over. `outcome`: ``finished``, or the exception's class. `notes`: what the guard knows against
        an exact resume."""


class KeptSteps(Protocol):
    """Keeps a little of each step where a kill leaves it, and compares the steps that are done again. Training thread
    only."""

    @property
    def are_redone(self) -> bool:
        """Whether steps come that were done before."""

    def at_boundary(self, position: Position, loss: object) -> None:
        """A step has ended with a boundary. `loss`: as the program gave it."""


class ProofObserver(Observer, Protocol):
    """Of a run under `mindx-elastic prove` or `drill`, whose files lie apart."""

    def redirected(self, wanted: Sequence[Path]) -> list[Path]:
        """Private folders in place of the directories that the program names."""

    def redirected_file(self, path: Path) -> Path:
        """A private place for a file that the program names."""

    def enter(self, stack: ExitStack, seen: Observed) -> None:
        """The state is back, and alarms are heard. `stack` closes it."""


class NotKept(Protocol):
    """Looks at the first boundaries of one entered guard. Training thread only; runs no code of the program."""

    counts: Sequence[str]
    """Names of those that `at_boundary` has found which have counted the steps of this process alone."""

    def at_boundary(self, is_ahead: Callable[[], bool]) -> Sequence[str] | None:
        """A boundary has been passed. Returns the names at the fifth one, where the look ends. `is_ahead`: whether the
        program has fetched batches of named loaders for later steps; they are fetched again by a resumed run."""


class Observers(Protocol):
    """What the module has that answers for the port ``observers``."""

    def open_proof(self, ranks: RankInfo) -> ProofObserver | None:
        """None: this is an ordinary run."""

    def look_for_not_kept(self, targets: Mapping[str, Any], collector: Collector) -> NotKept:
        """What finds the variables that go on from step to step and are in no file."""

    def open_played(self, stack: ExitStack, seen: Observed, path: Path) -> Observer:
        """What notes the step that a stopping job plays on. `path`: the file of the boundary `seen.position`."""

    def open_comparison(self, stack: ExitStack, seen: Observed, *, on_difference: str) -> Observer | None:
        """What compares the first step of a resumed run with that one, and tells; None: there is none to compare with.
        `on_difference`: ``warn``, or ``stop``: its `at_boundary` raises ResumeDiffersError on all ranks."""

    def open_kept_steps(self, stack: ExitStack, seen: Observed, path: Path) -> KeptSteps | None:
        """What keeps steps in the file `path` in shared memory. None: it cannot be used."""

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
