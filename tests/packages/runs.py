"""Runs the parts of one package: in forks of a process that has imported it, since some take many seconds for that."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.packages.part import Part

__all__ = ["Result", "run_package"]

_STOP = 12
"""Of 24 steps in 3 epochs: in the middle of the second one."""
_MOST_S = 300
_OWN = re.compile(r"SIGTERM heard|Graceful exit|ends after the step")
_TOLD = re.compile(r"^SAID (?:WARNING|ERROR) (.*)|^SAID INFO verified: .*; (not as they were: .*)", re.M)
_REFUSAL = re.compile(r"mindx_elastic\.errors\.\w+: (.*)")


@dataclass(frozen=True)
class Result:
    """What came of a part."""

    id: str
    version: str
    verdict: str
    """equal, refused, told, silent, or failed: the program by itself did not run."""
    text: str
    """What was said."""


def run_package(parts: Sequence[Part]) -> list[Result]:
    """All parts of one package, in a process that is gone afterwards. Empty: it is not installed."""
    try:
        version = importlib.metadata.version(parts[0].package)
    except importlib.metadata.PackageNotFoundError:
        return []
    _prepare()
    results: list[Result] = []
    output, code = _forked(lambda: _run_all(parts, version), len(parts) * _MOST_S)
    for line in output.splitlines():
        if line.startswith("RESULT "):
            results.append(Result(**json.loads(line[7:])))
    done = {result.id for result in results}
    missing = [part for part in parts if part.id not in done]
    return results + [Result(part.id, version, "failed", f"exit code {code}: {_last_line(output)}") for part in missing]


def _run_all(parts: Sequence[Part], version: str) -> None:
    for part in parts:
        folder = Path(tempfile.mkdtemp(prefix="mindx-packages-"))
        try:
            verdict, text = _judge(part, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print("RESULT", json.dumps(asdict(Result(part.id, version, verdict, text))), flush=True)


@functools.cache
def _prepare() -> None:
    """Import what all runs need, once."""
    import torch
    import torch._dynamo

    import tests.natural.run  # noqa: F401

    torch.set_num_threads(1)
    # A torchvision that was built for CUDA cannot load its operators beside a torch for the CPU, and fails where it
    # describes them; none is used here.
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))


def _judge(part: Part, folder: Path) -> tuple[str, str]:
    script = folder / "train.py"
    script.write_text(part.source(), encoding="utf-8")
    _import_ahead(part)
    straight, code = _forked(lambda: _run_script(script, folder / "straight", 0), _MOST_S)
    said = _said(straight)
    if code:
        refused = _REFUSAL.findall(straight)
        return ("refused", refused[-1]) if refused else ("failed", _last_line(straight))
    stopped, code = _forked(lambda: _run_script(script, folder / "stopped", _STOP), _MOST_S)
    said += _said(stopped)
    if code != 143:
        return "told" if said else "failed", _joined(said) or f"stopped: exit code {code}: {_last_line(stopped)}"
    resumed, code = _forked(lambda: _run_script(script, folder / "stopped", 0), _MOST_S)
    said += _said(resumed)
    refused = _REFUSAL.findall(resumed)
    if code:
        return ("refused at the resume" if refused else "failed at the resume"), (refused or [_last_line(resumed)])[-1]
    if "SAID INFO resumed from" not in resumed:
        return "not saved", _joined(said)
    equal = _weights(straight) == _weights(resumed)
    return ("equal" if equal else "told" if said else "silent"), _joined(said)


def _said(output: str) -> list[str]:
    found = [warning or fact for warning, fact in _TOLD.findall(output)]
    return [text for text in found if not _OWN.search(text)]


def _joined(said: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(said))


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip(" ^~")), "")


def _weights(output: str) -> list[str]:
    return re.findall(r"^(?:WEIGHTS|STEPS) .*", output, re.M)


def _import_ahead(part: Part) -> None:
    """The modules that the part's own lines import."""
    for line in re.findall(r"^\s*(?:from (\S+) import .*|import ([\w.]+).*)$", part.make + part.whole, re.M):
        with contextlib.suppress(Exception):
            __import__(line[0] or line[1])


def _run_script(script: Path, directory: Path, stop: int) -> None:
    """As ``python train.py DIRECTORY``; a real SIGTERM in step `stop`, heard before the step ends."""
    from tests.natural.run import count_steps, stop_in

    os.environ.update(OMP_NUM_THREADS="1", MINDX_GRACE_S="120", COLUMNS="500", NO_COLOR="1")
    said = logging.StreamHandler(sys.stdout)  # a library may give the root logger handlers that leave INFO out
    said.setFormatter(logging.Formatter("SAID %(levelname)s %(message)s"))
    logging.getLogger("mindx_elastic").addHandler(said)
    logging.getLogger("mindx_elastic").setLevel(logging.INFO)
    stop_in(stop, rank=0)
    steps = count_steps()
    main = types.ModuleType("__main__")
    main.__file__, sys.modules["__main__"], sys.argv = str(script), main, [str(script), str(directory)]
    os.chdir(script.parent)
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), main.__dict__)  # noqa: S102
    print("STEPS", steps[0], flush=True)


def _forked(job: Callable[[], None], most_s: float) -> tuple[str, int]:
    """What `job` printed in a child of this process, and the child's exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _be_child(job, write)
    os.close(write)
    chunks: list[bytes] = []
    end = time.monotonic() + most_s
    while select.select([read], [], [], max(0, end - time.monotonic()))[0] and (chunk := os.read(read, 1 << 16)):
        chunks.append(chunk)
    if time.monotonic() >= end:
        os.killpg(pid, signal.SIGKILL)
    os.close(read)
    return b"".join(chunks).decode(errors="replace"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be_child(job: Callable[[], None], write: int) -> None:
    os.setsid()
    warnings.resetwarnings()  # pytest makes errors of them, and the packages have many
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    code = 1
    try:
        job()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)
