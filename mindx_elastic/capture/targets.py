"""Names for the objects of a job, as they will stand in the checkpoint's tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindx_elastic.errors import UsageError

__all__ = ["RESERVED_NAMES", "name_targets"]

RESERVED_NAMES = ("rng", "progress", "gradient_order")


def name_targets(
    *, model: Any, optimizer: Any, lr_scheduler: Any, scaler: Any, loader: Any, stateful: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One entry an object: ``model``, or ``model_0``, ``model_1`` for a list.

    Raises UsageError for a name given twice.
    """
    if stateful is not None and not isinstance(stateful, Mapping):
        raise UsageError(f"stateful={stateful!r}: give a dict of names and objects, for example {{'ema': ema}}")
    named: dict[str, Any] = {}
    for name, value in (("model", model), ("optimizer", optimizer), ("lr_scheduler", lr_scheduler), ("scaler", scaler)):
        if isinstance(value, (list, tuple)):
            named.update({f"{name}_{index}": one for index, one in enumerate(value)})
        elif value is not None:
            named[name] = value
    if loader is not None:
        named["loader"] = loader
    for name, value in (stateful or {}).items():
        if not isinstance(name, str) or name in named or name in RESERVED_NAMES:
            raise UsageError(f"stateful[{name!r}]: that name is taken or no string; choose another")
        named[name] = value
    return named
