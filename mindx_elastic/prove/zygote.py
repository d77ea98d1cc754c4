"""A process that has imported torch and this package, and forks one process for each run of the script.

::

    python -c "from mindx_elastic.prove.zygote import serve; serve()" DESCRIPTOR

Importing torch takes seconds, which is most of a short run. A fork is as good as a fresh interpreter as long as nothing
has happened but imports: no thread, no CUDA context, no number drawn. `serve` looks, and says so if that does not hold.
What a fresh interpreter begins with by chance, the forked one gets anew: the seeds of Python's, numpy's and torch's
streams. The seed of Python's hashes cannot be had anew, so a proof uses two of these processes.

Requests and answers are JSON on a socket, one a packet. One run at a time.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindx_elastic.prove.script import run

__all__ = ["COMMAND", "MOST_BYTES", "serve"]

COMMAND = "from mindx_elastic.prove.zygote import serve; serve()"
MOST_BYTES = 1 << 20
"""Of a request: the environment, mostly."""
_PR_SET_PDEATHSIG = 1


def serve() -> None:
    """Fork a process for each request. Returns in those, once their script has ended; never in the server."""
    _die_with_parent(signal.SIGKILL)
    channel = socket.socket(fileno=int(sys.argv[1]))
    problem = _import_everything()
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if "." not in name}
    del files["__main__"]
    channel.send(json.dumps({"problem": problem, "modules": files}).encode())
    gc.collect()
    gc.freeze()  # else each collection of a forked process copies the memory that it shares
    while message := channel.recv(MOST_BYTES):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            channel.close()
            _begin(parent=parent, **json.loads(message))
            return
        channel.send(json.dumps({"pid": pid}).encode())
        _, status = os.waitpid(pid, 0)
        channel.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
    os._exit(0)


def _import_everything() -> str:
    """Returns why a fork of this process is not what a fresh interpreter is; empty: it is."""
    import numpy  # noqa: F401

    # OpenBLAS starts its threads here. It ends them before a fork and starts them again where they are needed.
    num_threads = _num_threads()

    import torch._dynamo  # the first step of an optimizer does
    import torch.distributed
    import torch.utils.data

    import mindx_elastic.data
    import mindx_elastic.guard.guard
    import mindx_elastic.train  # noqa: F401

    if _num_threads() > num_threads:
        return "importing torch has started threads"
    if torch.cuda.is_initialized():
        return "importing torch has initialised CUDA"
    return ""


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _begin(
    *, parent: int, command: list[str], env: dict[str, str], cwd: str, log: str, notes: str | None, death: int
) -> None:
    os.setsid()
    _die_with_parent(death)
    if os.getppid() != parent:
        os._exit(1)
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):  # a line must be seen at once: silence counts as hanging
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None  # the environment may name another one
    _seed_at_random()
    run(command, notes=None if notes is None else Path(notes))


def _seed_at_random() -> None:
    """As imports do."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.default_generator.seed()


def _die_with_parent(signum: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux as we know it; then a killed `prove` leaves its run behind
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
