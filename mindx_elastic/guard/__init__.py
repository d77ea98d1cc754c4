"""`Guard`: what a training loop needs to stop anywhere and resume bit for bit; its life is in `guard.guard`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindx_elastic.guard.guard import DEFAULT_SIGNALS as DEFAULT_SIGNALS
    from mindx_elastic.guard.guard import Guard as Guard

__all__ = ["DEFAULT_SIGNALS", "Guard"]


def __getattr__(name: str) -> Any:
    # The agent reads constants of this package and must not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.guard"), name)
