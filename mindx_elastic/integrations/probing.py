"""Whether the library at hand has the private places that an integration needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import UsageError

__all__ = ["check_library"]

_told: set[str] = set()


def check_library(distribution: str, tried: Sequence[str], owner: Any, names: Iterable[str]) -> None:
    """Raise UsageError when `owner`, a part of `distribution`, lacks one of `names`, which may have dots.

    `tried`: the releases, as ``2.6``, that the integration has been tried with. With another one that has all that is
    needed, one warning says so.
    """
    found = version(distribution)
    missing = [f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for name in names if not _has(owner, name)]
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


def _has(owner: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True
