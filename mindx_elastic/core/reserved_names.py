"""Names of what a checkpoint's state holds besides the job's objects. An object of the program cannot have them."""

from __future__ import annotations

__all__ = ["RESERVED_NAMES"]

RESERVED_NAMES = (
    "rng",
    "progress",
    "gradient_order",
    "buffer_broadcasts",
    "compiled_calls",  # of older versions
    "module_extras",
    "tensor_devices",
    "settings_given",
)
"""All of them are a rank's own."""
