"""Helper process of `test_killed_saves`: forks a child for each point of a save and kills it there with SIGKILL.

    python killed_saves.py ROOT

Every child finds its own folder ROOT/<point> with an old checkpoint (step 1) in it, and starts to save step 2 under the
same names. Forking from this process spares an import of torch per point. Prints a JSON object: point -> signal number.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.persist import writer
from tests.checkpoint_files import info_of

NAMES = ("x.safetensors", "also.safetensors")
POINTS = {
    # point: (where, name, kill before (0) or after (1) the call, which call)
    "temp file created": (writer, "create_temp", 1, 1),
    "space reserved": (writer._Save, "reserve", 1, 1),
    "first block written": (os, "pwrite", 1, 1),
    "second block written": (os, "pwrite", 1, 2),
    "data written": (writer._Save, "write_header", 0, 1),
    "header written": (writer._Save, "write_header", 1, 1),
    "cut to size": (os, "ftruncate", 1, 1),
    "flushed": (writer._Save, "flush", 1, 1),
    "older kept": (writer._Save, "keep_older", 1, 1),
    "renamed": (os, "rename", 1, 2),  # the first one keeps the older file
    "published": (writer, "publish", 1, 1),
    "directory flushed": (writer, "fsync_dir", 1, 1),
    "older kept, other name": (writer._Save, "keep_older", 1, 2),
    "other name published": (writer, "publish_copy", 1, 1),
    "directory flushed again": (writer, "fsync_dir", 1, 2),
    "never": (writer, "fsync_dir", 1, 99),
}


def save(folder: Path, step: int) -> None:
    state = {"big": torch.full((3 << 20,), step, dtype=torch.float32), "small": torch.tensor(step)}  # 12 MiB: 3 blocks
    path, also = (folder / name for name in NAMES)
    writer.write_checkpoint(path, state, info_of(step), also=[also])


def kill_at(where: Any, name: str, after: int, which: int) -> None:
    original: Callable[..., Any] = getattr(where, name)
    calls = itertools.count(1)  # of several threads

    def call(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if number == which and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if number == which:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(where, name, call)


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)  # nothing may have started threads before a fork
    ends = {}
    for point, spec in POINTS.items():
        folder = root / point
        folder.mkdir()
        save(folder, 1)
        child = os.fork()
        if child == 0:
            try:
                kill_at(*spec)
                save(folder, 2)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        ends[point] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
