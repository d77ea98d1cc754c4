"""The documented import path: ``from mindx_elastic.terminating_message import ExceptionCheckpoint``."""

from __future__ import annotations

from mindx_elastic.train.checkpoint import ExceptionCheckpoint

__all__ = ["ExceptionCheckpoint"]
