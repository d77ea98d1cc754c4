"""A process that has imported torch and this package, and forks one process for each run of the script.

::

    python -c "from mindx_elastic.prove.zygote import serve; serve()" DESCRIPTOR

`core.forking` says when that is as good as a fresh interpreter. The seed of Python's hashes cannot be had anew, so a
proof uses two of these processes.

Requests and answers are JSON on a socket, one a packet. One run at a time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

from mindx_elastic.core.forking import BASE_MODULES, die_with_parent, freeze, import_all, seed_at_random
from mindx_elastic.prove.script import run

__all__ = ["COMMAND", "MOST_BYTES", "serve"]

COMMAND = "from mindx_elastic.prove.zygote import serve; serve()"
MOST_BYTES = 1 << 20
"""Of a request: the environment, mostly."""


def serve() -> None:
    """Fork a process for each request. Returns in those, once their script has ended; never in the server."""
    die_with_parent(signal.SIGKILL)
    channel = socket.socket(fileno=int(sys.argv[1]))
    problem = import_all(BASE_MODULES)
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if "." not in name}
    del files["__main__"]
    channel.send(json.dumps({"problem": problem, "modules": files}).encode())
    freeze()
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


def _begin(
    *, parent: int, command: list[str], env: dict[str, str], cwd: str, log: str, notes: str | None, death: int
) -> None:
    os.setsid()
    die_with_parent(death)
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
    seed_at_random()
    run(command, notes=None if notes is None else Path(notes))
