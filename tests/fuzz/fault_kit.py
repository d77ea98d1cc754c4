"""What a program made by chance imports: places at which it may die. It stands for no code of the program, so it is run
from a folder that is none of the program's (see `play`)."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import Counter, deque
from typing import Any

import torch

_passed: Counter[str] = Counter()


def at(place: str) -> None:
    """Die here if this is the place, and the time, of one of the faults ``FAULTS=place:number:how,...``; each once.

    how: ``raise``, or names of signals that this process sends itself one after the other, as ``SIGTERM+SIGINT``; with
    ``wait`` the first is heard before the program goes on, so that the job stops at this very step.
    """
    _passed[place] += 1
    rank = os.environ.get("RANK", "0")
    for fault in filter(None, os.environ.get("FAULTS", "").split(",")):
        where, number, how = fault.split(":")
        mark = os.path.join(os.environ["FAULT_MARKS"], fault.replace(":", "-"))
        is_now = where == place and int(number) == _passed[place] and rank == os.environ.get("FAULT_RANK", rank)
        if not is_now or os.path.exists(mark):
            continue
        with open(mark, "x"):
            os.write(1, f"FAULT {fault}\n".encode())
        if how == "raise":
            raise RuntimeError("made by chance")
        for name in how.split("+"):
            if name == "wait":
                time.sleep(0.3)
            else:
                os.kill(os.getpid(), signal.Signals[name])


def tell(results: dict[str, Any], step: int | None) -> None:
    """Print the digests of what was trained."""
    rank = os.environ.get("RANK", "0")
    for name, value in results.items():
        digest = hashlib.sha256()
        _add(value, digest)
        os.write(1, f"RESULT {rank} {name} {digest.hexdigest()[:12]}\n".encode())
    os.write(1, f"ENDED {rank} {step}\n".encode())


def _add(value: Any, digest: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key, each in value.items():
            digest.update(str(key).encode())
            _add(each, digest)
    elif isinstance(value, (list, tuple, deque)):
        for each in value:
            _add(each, digest)
    else:
        digest.update(repr(value).encode())
