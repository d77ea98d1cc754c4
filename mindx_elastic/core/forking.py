"""What it takes to fork a process that is as good as a fresh interpreter, for `prove` and the agent.

Importing torch takes seconds, which is most of a worker's start. A fork of a process that has imported it takes
milliseconds, and is as good as a fresh interpreter as long as nothing has happened but imports: no thread, no CUDA
context, no number drawn. `import_all` looks, and says so if that does not hold. What a fresh interpreter begins with by
chance, the forked one draws again (`seed_at_random`). The seed of Python's hashes cannot be drawn again.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

__all__ = ["BASE_MODULES", "freeze", "import_all", "seed_at_random"]

BASE_MODULES = (
    "torch._dynamo",  # the first step of an optimizer imports it
    "torch.distributed",
    "torch.utils.data",
    "mindx_elastic.data",
    "mindx_elastic.guard.guard",
    "mindx_elastic.train",
)
"""What nearly all trainings import."""


def import_all(names: Iterable[str]) -> str:
    """Import numpy and the modules `names`. Returns why a fork of this process is not what a fresh interpreter is;
    empty: it is. Raises what the imports raise. Main thread, once, before anything else is imported."""
    gc.disable()  # an eighth of the time would go into looking for garbage in what stays; `freeze` enables it
    import numpy  # noqa: F401

    # OpenBLAS starts its threads here. It ends them before a fork and starts them again where they are needed.
    count = _num_threads()
    for name in names:
        importlib.import_module(name)
    if _num_threads() > count:
        return "importing torch has started threads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing torch has initialised CUDA"
    return ""


def _num_threads() -> int:
    """The threads of this process, also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def freeze() -> None:
    """Before the forks: else each collection of a forked process copies the memory that it shares."""
    gc.collect()
    gc.freeze()
    gc.enable()


def seed_at_random() -> None:
    """Call it in the forked process. Draw again what imports have drawn, and forget what they have looked up in the
    environment."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None
    tempfile._name_sequence = None  # type: ignore[attr-defined]
