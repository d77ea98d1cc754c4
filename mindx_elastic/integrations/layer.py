"""What the integrations do alike: they probe the library, name what they keep, and put a trainer's loop where it stood.

A trainer prepares its loop before it is at the place of the resumed step. What the guard keeps of the loop meanwhile is
what it has loaded (`Standing`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.capture.plain_component import InParts
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.guard import Guard

__all__ = ["Standing", "check_library", "end_step", "finish_cut_step", "is_of_program", "with_names_of"]

_told: set[str] = set()


def check_library(distribution: str, tried: Sequence[str], *parts: tuple[Any, Iterable[str]]) -> None:
    """Raise UsageError when a part of `distribution` lacks one of its names, which may have dots.

    `tried`: the releases, as ``2.6``, that the integration has been tried with. With another one that has all that is
    needed, one warning says so.
    """
    found = version(distribution)
    missing = [f"{_name(owner)}.{name}" for owner, names in parts for name in names if not _has(owner, name)]
    if missing:
        raise UsageError(
            f"{distribution} {found} lacks {listed(missing, 4)}, which this integration of mindx_elastic needs; it "
            f"was tried with {distribution} {listed(list(tried), 4)}. Install one of these, or use "
            "mindx_elastic.Guard in a loop of your own"
        )
    if not any(found == each or found.startswith(f"{each}.") for each in tried) and distribution not in _told:
        _told.add(distribution)
        logger.warning(
            "%s %s: this integration was tried with %s; `mindx-elastic prove` tells whether a resumed run is exact",
            distribution,
            found,
            listed(list(tried), 4),
        )


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))


def _has(owner: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def is_of_program(what: Any, *libraries: str) -> bool:
    """Whether the program has written a class or function, and not one of `libraries` or this package."""
    return str(what.__module__).partition(".")[0] not in (*libraries, "mindx_elastic")


def with_names_of(
    own: Mapping[str, Any], given: Mapping[str, Any] | None, reserved: Sequence[str] = ()
) -> dict[str, Any]:
    """The guard's ``stateful``: what an integration keeps and what the program has given. Raises UsageError where the
    program's has a name of the integration's."""
    if taken := sorted({*own, *reserved} & set(given or {})):
        raise UsageError(f"stateful={{{taken[0]!r}: ...}}: that name is the integration's own; choose another")
    return {**own, **(given or {})}


class Standing(InParts):
    """Where a trainer's loop stands."""

    def __init__(self) -> None:
        self.resumed: Mapping[str, Any] | None = None
        """Of the resumed step, while the trainer prepares its loop; None: the loop moves."""
        self.is_cut = False
        """What follows the step (log, validation, the trainer's save) has not been done."""

    @abstractmethod
    def now(self) -> dict[str, Any]:
        """The entries of the state but ``is_cut``, while the loop moves."""

    def state_dict(self) -> dict[str, Any]:
        if self.resumed is not None:
            return dict(copy_tree(self.resumed))
        return {**self.now(), "is_cut": self.is_cut}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.resumed, self.is_cut = state, state["is_cut"]


def end_step(guard: Guard, standing: Standing, rest: Callable[[], object], *, is_long: bool) -> None:
    """A step of the trainer has ended, but for `rest`. Where that `is_long` (a validation), the step is a boundary
    before it as well, with the note that it is still to come: it can be cut off, and is done again."""
    if not is_long:
        rest()
        guard.step_end()
        return
    standing.is_cut = True
    guard.boundary()
    guard.finish_step()
    finish_cut_step(guard, standing, rest)


def finish_cut_step(guard: Guard, standing: Standing, rest: Callable[[], object]) -> None:
    """Do what follows a step that is a boundary already."""
    rest()
    standing.is_cut = False
    guard.finish_step(retake=True)
