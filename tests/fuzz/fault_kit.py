"""What a program made by chance imports: places at which it may die, alone or with others. It stands for
no code of the program, so it is run from a folder that is none of the program's (see `play`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_passed: Counter[str] = Counter()
_marks = Path(os.environ["FAULT_MARKS"])


def at(place: str) -> None:
    """Die here if this is the place, and the time, of one of the faults ``FAULTS=place:number:how[:rank],...``; each
    once. Of ``first>second`` the second comes only after the first.

    how: ``raise``, a key of `_DEEDS`, or names of signals that are sent one after the other, as ``SIGTERM+SIGINT``: to
    this process, or as ``SIGKILL@1``, ``SIGKILL@all``, ``SIGTERM@agent``. With ``wait`` the first is heard before the
    program goes on, so that the job stops at this step. ``SIGSTOP~2~SIGCONT``: the next so many seconds later.
    """
    _passed[place] += 1
    if place == "built":
        (_marks / f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    for fault in _faults(place):
        if int(fault.split(":")[1]) != _passed[place]:
            continue
        with open(_mark(fault), "x"):
            os.write(1, f"FAULT {fault}\n".encode())
        _strike(fault.split(":")[2])


def _mark(fault: str) -> Path:
    return _marks / fault.replace(":", "-")


def _faults(place: str) -> list[str]:
    """Those to come of this process at a place. A cluster's scheduler has none but by the hand of a worker."""
    rank = os.environ.get("RANK", os.environ.get("MS_NODE_ID", "0"))
    found = []
    for row in os.environ.get("FAULTS", "").split(","):
        fault = next((each for each in row.split(">") if not _mark(each).exists()), "")
        where, *_, whose = [*fault.split(":"), os.environ.get("FAULT_RANK", rank)][:4]
        if where == place and whose == rank:
            found.append(fault)
    return found


def _strike(how: str) -> None:
    now, *later = how.split("~")
    if later:  # by a process that outlives this one, and the job's session
        delays_and_signals = zip(later[::2], later[1::2], strict=True)
        script = [f"sleep {delay}; {_kills(signals)}" for delay, signals in delays_and_signals]
        subprocess.Popen(["sh", "-c", "; ".join(script)], start_new_session=True, stderr=subprocess.DEVNULL, env={})
    if now == "raise":
        raise RuntimeError("made by chance")
    for name in filter(None, now.split("+")):
        if deed := _DEEDS.get(name):
            deed()
        elif "@" in name:
            subprocess.run(["sh", "-c", _kills(name)], stderr=subprocess.DEVNULL, check=False)
        else:
            os.kill(os.getpid(), signal.Signals[name])


def _kills(signals: str) -> str:
    """The shell's lines for signals such as ``SIGKILL@1+SIGCONT``."""
    lines = []
    for each in signals.split("+"):
        name, _, whom = each.partition("@")
        kill = f"kill -{name.removeprefix('SIG')}"
        if whom == "agent":
            lines.append(f"{kill} {_agent()}")
        else:
            files = f"{_marks}/pid-{'*' if whom == 'all' else whom or os.environ['RANK']}"
            lines.append(f"for p in $(cat {files}); do grep -qs {_marks} /proc/$p/environ && {kill} $p; done")
    return "; ".join(lines)


def _agent() -> int:
    """The process above this one that the player has started."""
    pid = os.getpid()
    while (above := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) not in (
        int(os.environ["PLAYER"]),
        1,
    ):
        pid = above
    return pid


def entered(step: int) -> None:
    """Print how many steps a start or a recovery has lost: those that every rank had done are further than `step`."""
    done = [int(path.read_text()) for path in _marks.glob("step-*")]
    os.write(1, f"LOST {min(done, default=0) - step} at {step}\n".encode())
    at("entered")


def passed(step: int, model: torch.nn.Module) -> None:
    """A step has ended: with a boundary, unless its gradients wait for the rest of their accumulation window."""
    if all(p.grad is None for p in model.parameters()):
        temporary = _marks / f"next-{os.environ.get('RANK', '0')}"
        temporary.write_text(str(step))
        temporary.replace(_marks / f"step-{os.environ.get('RANK', '0')}")
    at("after")


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
        value = value.to_local() if hasattr(value, "to_local") else value
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
