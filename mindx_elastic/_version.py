"""The version, in the one place that the build, the wheel's name and the command line read it from."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.3.0"
