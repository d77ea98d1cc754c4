"""SIGKILL before every system call of a save: there is always a good file, and nothing is left over.

Run as a program it forks a child for each call and kills it there: no test process may be forked.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.persist import direct_io
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.reader import read_checkpoint, verify_file
from mindx_elastic.persist.storage import TEMP_SUFFIX, remove_stale_temps
from mindx_elastic.persist.writer import previous_path, write_checkpoint
from tests.checkpoint_files import info_of
from tests.watchdog import finish

NAMES = ("x.safetensors", "also.safetensors")
CALLS = ("open", "pwrite", "write", "ftruncate", "fsync", "rename", "link", "unlink")


def save(folder: Path, step: int) -> None:
    state = {"big": torch.full((3 << 17,), step, dtype=torch.float32), "small": torch.tensor(step)}  # 3 blocks
    path, also = (folder / name for name in NAMES)
    write_checkpoint(path, state, info_of(step), also=[also])


def before_call(which: int, act: Callable[[], object], replace: Callable[[Any, str, Any], None]) -> None:
    """Do `act` before the system call number `which` of a save. `replace`: as `setattr`."""
    numbers = itertools.count(1)  # of several threads

    def patch(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            if next(numbers) == which:
                act()
            return real(*args, **more)

        replace(os, name, call)

    for name in CALLS:
        patch(name)


def main(root: Path) -> None:
    torch.set_num_threads(1)  # nothing may have started threads before a fork
    direct_io.BLOCK_BYTES = 1 << 19
    for number in itertools.count(1):
        folder = root / str(number)
        folder.mkdir()
        save(folder, 1)
        child = os.fork()
        if child == 0:
            try:
                before_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL), setattr)
                save(folder, 2)
            finally:
                os._exit(0)
        if os.WIFEXITED(os.waitpid(child, 0)[1]):
            return


def test_a_kill_at_any_point_leaves_a_good_file(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = finish([sys.executable, Path(__file__), tmp_path], env=environment, fresh=False)
    assert done.returncode == 0, done.stderr
    found = []
    for folder in sorted(tmp_path.iterdir(), key=lambda path: int(path.name)):
        remove_stale_temps(folder)
        assert not [name for name in os.listdir(folder) if name.endswith(TEMP_SUFFIX)], folder
        for path in (folder / name for name in NAMES):
            assert verify_file(path) == []
            step = read_header(path).info.step
            assert read_checkpoint(path).state["big"][-1] == step
            found.append(step)
            if step == 2:
                assert verify_file(previous_path(path)) == []
                assert read_header(previous_path(path)).info.step == 1
    both = list(zip(found[::2], found[1::2], strict=True))
    assert both == sorted(both) and set(both) == {(1, 1), (2, 1), (2, 2)}, "the second name comes after the first"
    assert len(both) > 15, "every call was tried"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
