"""The torch at hand: its version, and its internals that recoveries in place need."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

from mindx_elastic.core.printable import listed
from mindx_elastic.doctor.finding import Finding, good, problem, warning
from mindx_elastic.rejoin import groups

__all__ = ["look_at_software"]

_LEAST_TORCH = (2, 6)
_TRIED_TORCH = "2.13"


def look_at_software() -> Iterator[Finding]:
    """Versions."""
    found = tuple(int(part) if part.isdecimal() else 0 for part in torch.__version__.split("+")[0].split(".")[:2])
    text = f"torch {torch.__version__}, Python {platform.python_version()}"
    if found < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        yield problem("torch", f"{text}: too old", f"pip install 'torch>={least}'")
    else:
        yield good("torch", text)
    yield from _in_place()


def _in_place() -> Iterator[Finding]:
    remedy = "the job is restarted instead; in place: one of the versions of torch in docs/agent.md"
    if missing := groups.missing_calls():
        text = f"torch {torch.__version__} lacks {listed(missing, 6)}: --recover in-place is not possible"
        yield warning("in place", text, remedy)
        return
    tried = torch.__version__.startswith(f"{_TRIED_TORCH}.") or torch.__version__ == _TRIED_TORCH
    how = "" if tried else f" (it was tried with torch {_TRIED_TORCH})"
    yield good("in place", f"torch has all that --recover in-place needs{how}")
