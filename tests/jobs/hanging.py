"""``loop.py`` with one thing that hangs for ever: ``LOOP_HANGS=copy|flag|log|stderr``. Prints ``HANGS what``.

The real waits, not a slow machine: what hangs never comes back, so no test need look at a clock.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from mindx_elastic.memory import snapshots as snapshotting_module
from mindx_elastic.platforms.flag_file import FlagFile
from tests.jobs import loop
from tests.jobs.kit import say


def hang(what: str) -> None:
    say(f"HANGS {what}")
    threading.Event().wait()


def hang_in_copy() -> None:
    """The copy of a snapshot, which the training thread has lent the update gate to."""

    def reach(stage: str) -> None:
        if stage == "copying":
            hang("copy")

    mock.patch.object(snapshotting_module, "reach", reach).start()


def hang_in_stderr() -> None:
    """Whoever reads stderr has stopped reading."""
    _, end = os.pipe()
    os.set_blocking(end, False)
    try:
        while True:
            os.write(end, b"x" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(end, True)
    os.dup2(end, 2)


def hang_in_poll(flag: FlagFile) -> None:
    hang("flag")


def log_for_ever() -> None:
    say("HANGS stderr")
    logging.getLogger("mindx_elastic").error("full")


class Trainer(loop.Trainer):
    """Begins to hang at the step that it is held at."""

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        if self.guard.position.step + 1 == self.args.hold_at and self.guard.resumed_from_step is None:
            fault = os.environ["LOOP_HANGS"]
            if fault == "stderr":
                hang_in_stderr()
                # The lock of the handler is held by a thread that hangs in its write.
                threading.Thread(target=log_for_ever, daemon=True).start()
            elif fault == "flag":  # its file system is gone
                mock.patch.object(FlagFile, "poll", hang_in_poll).start()
            elif fault == "log":
                log = Path(self.args.directory) / "events.jsonl"
                log.rename(log.with_suffix(".kept"))
                os.mkfifo(log)  # opening it for writing waits for a reader
                say("HANGS log")
        super().step(x, y, number)


def run() -> None:
    torch.set_num_threads(1)
    arguments = loop.parse()
    if os.environ.get("LOOP_HANGS") == "copy":
        hang_in_copy()
    Trainer(arguments).run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run()
