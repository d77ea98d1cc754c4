"""The names of the objects that a guard keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.errors import UsageError

__all__ = ["name_targets"]


def name_targets(
    *, model: Any, optimizer: Any, lr_scheduler: Any, scaler: Any, loader: Any, stateful: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One entry an object: ``model``, or ``model_0``, ``model_1`` for a list.

    Raises UsageError for a name given twice.
    """
    if stateful is not None and not isinstance(stateful, Mapping):
        raise UsageError(f"stateful={stateful!r}: give a dict of names and objects, for example {{'ema': ema}}")
    named: dict[str, Any] = {}
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "scaler": scaler, "loader": loader}
    for name, value in objects.items():
        if isinstance(value, (list, tuple)):
            named.update({f"{name}_{index}": one for index, one in enumerate(value)})
        elif value is not None:
            named[name] = value
    for name, value in (stateful or {}).items():
        key = f"stateful.{name}" if name in RESERVED_NAMES else name  # "rng" is what people call theirs
        if not isinstance(name, str) or key in named:
            raise UsageError(f"stateful[{name!r}]: that name is taken or not a string; choose another")
        named[key] = value
    return named
