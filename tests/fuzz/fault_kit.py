"""What a program made by chance imports: places at which it may die. It stands for no code of the program, so it is run
from a folder that is none of the program's (see `play`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_passed: Counter[str] = Counter()


def at(place: str) -> None:
    """Die here if this is the place, and the time, of one of the faults ``FAULTS=place:number:how,...``; each once.

    how: ``raise``, a key of `_DEEDS`, or names of signals that this process sends itself one after the other, as
    ``SIGTERM+SIGINT``; with ``wait`` the first is heard before the program goes on, so that the job stops at this step.
    """
    _passed[place] += 1
    for fault in _faults(place):
        mark = os.path.join(os.environ["FAULT_MARKS"], fault.replace(":", "-"))
        if int(fault.split(":")[1]) != _passed[place] or os.path.exists(mark):
            continue
        with open(mark, "x"):
            os.write(1, f"FAULT {fault}\n".encode())
        for name in fault.split(":")[2].split("+"):
            if name == "raise":
                raise RuntimeError("made by chance")
            deed = _DEEDS.get(name)
            deed() if deed else os.kill(os.getpid(), signal.Signals[name])


def _faults(place: str) -> list[str]:
    """Those of this process at a place. Nothing befalls the scheduler of a cluster but by the hand of a worker."""
    rank = os.environ.get("RANK", os.environ.get("MS_NODE_ID", "0"))
    if rank != os.environ.get("FAULT_RANK", rank):
        return []
    return [each for each in os.environ.get("FAULTS", "").split(",") if each.startswith(f"{place}:")]


def _flag(text: str = '{"GracefulExit": 1}') -> None:
    os.makedirs(os.path.dirname(os.environ["FLAG_FILE"]), exist_ok=True)
    with open(os.environ["FLAG_FILE"], "w") as file:
        file.write(text)


def _mount(key: str, text: str) -> None:
    """As Kubernetes updates the ConfigMap that it has mounted: a new folder, and ``..data`` is swapped."""
    folder = os.environ["MINDX_FAULT_DIR"]
    dated = tempfile.mkdtemp(prefix="..2026_", dir=folder)
    with open(os.path.join(dated, key), "w") as file:
        file.write(text)
    os.symlink(os.path.basename(dated), os.path.join(folder, "..data_tmp"))
    os.replace(os.path.join(folder, "..data_tmp"), os.path.join(folder, "..data"))
    if not os.path.lexists(os.path.join(folder, key)):
        os.symlink(f"..data/{key}", os.path.join(folder, key))


def _kill(*names: str) -> None:
    for name in names or [each[:-4] for each in os.listdir("device") if each.endswith(".pid")]:
        with open(f"device/{name}.pid") as file, contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read()), signal.SIGKILL)


_DEEDS: dict[str, Callable[[], object]] = {
    "wait": lambda: time.sleep(0.5),
    "flag": _flag,
    "torn": lambda: _flag('{"Graceful'),
    "report": lambda: _mount("fault-npus", f'{{"FaultRankIds": ["0"], "CreatTime": {int(time.time())}}}'),
    "torn_report": lambda: _mount("fault-npus", '{"FaultRankIds": ["0'),
    "reset": lambda: _mount("reset.json", '{"RankList": [], "GracefulExit": 1}'),
    "full": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)),
    "scheduler": lambda: _kill("scheduler"),
    "all": _kill,
}


def _trace(frame: FrameType, event: str, _: object) -> Any:
    """Count the lines of the program and of the package: the place ``line``."""
    if event == "line":
        at("line")
    elif not frame.f_code.co_filename.startswith(_TRACED):
        return None
    return _trace


_TRACED = (os.path.dirname(os.path.abspath(sys.argv[0])), os.path.dirname(sys.modules["mindx_elastic"].__file__ or ""))
if _faults("line"):
    sys.settrace(_trace)
    _above = sys._getframe()
    while _above.f_globals["__name__"] != "__main__" and _above.f_back:
        _above = _above.f_back
    _above.f_trace = _trace


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
