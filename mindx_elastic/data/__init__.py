"""Loaders whose position is part of the checkpoint: order, batches and augmentation continue where they stopped."""

from mindx_elastic.data.function import FunctionLoader as FunctionLoader
from mindx_elastic.data.function import from_function as from_function
from mindx_elastic.data.loader import ResumableLoader as ResumableLoader
from mindx_elastic.data.loader import from_loader as from_loader
from mindx_elastic.data.replay import ReplayLoader as ReplayLoader

__all__ = [
    "FunctionLoader",
    "ReplayLoader",
    "ResumableLoader",
    "from_function",
    "from_loader",
]
