"""Checks of `Model`'s arguments. Each raises UsageError with the argument's name, its value and a remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mindx_elastic.errors import UsageError

__all__ = ["autocast_dtype", "listed", "norm_limit", "whole_number"]


def listed(name: str, value: Any, kinds: tuple[type, ...]) -> list[Any]:
    items: Sequence[Any] = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if not isinstance(item, kinds):
            raise UsageError(f"{name} is a {type(item).__name__}; give a torch {kinds[0].__name__}, or a list of them")
    return list(items)


def whole_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r}; give a whole number of at least 1")
    return value


def norm_limit(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"max_grad_norm={value!r}; give a positive number, or None for no clipping")
    return float(value)


def autocast_dtype(amp: bool | torch.dtype, device: torch.device) -> torch.dtype | None:
    if isinstance(amp, torch.dtype):
        if amp not in (torch.float16, torch.bfloat16):
            raise UsageError(f"amp={amp}; give torch.float16, torch.bfloat16, True or False")
        return amp
    if not isinstance(amp, bool):
        raise UsageError(f"amp={amp!r}; give True, False or a torch.dtype")
    if not amp:
        return None
    return torch.float16 if device.type == "cuda" else torch.bfloat16
