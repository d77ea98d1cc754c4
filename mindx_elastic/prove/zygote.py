"""A process that has imported torch and this package, and forks one process for each run of the script.

::

    python -c "from mindx_elastic.prove.zygote import serve; serve()" DESCRIPTOR

`core.forking` says when that is as good as a fresh interpreter. The seed of Python's hashes cannot be had anew, so a
proof uses two of these processes.

Requests and answers are JSON on a socket, one a packet. One run at a time.

For a launcher (`mindx-elastic run`) two processes are forked: the launcher, and below it the process from which it
forks its workers (`agent.zygote_process`). So neither imports torch once more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

from mindx_elastic.agent.zygote import OWN_VARIABLES, take_ready_made
from mindx_elastic.agent.zygote_process import Imports, answer
from mindx_elastic.core.forking import BASE_MODULES, die_with_parent, freeze, import_all, seed_at_random
from mindx_elastic.core.script import execute, puts_folder_first
from mindx_elastic.prove.script import run

__all__ = ["COMMAND", "LAUNCHES", "MOST_BYTES", "serve"]

LAUNCHES = "launches"
"""Its second argument, where it forks launchers."""
_LAUNCHER = ("mindx_elastic.agent.launcher", "mindx_elastic.cli.main")
COMMAND = "from mindx_elastic.prove.zygote import serve; serve()"
MOST_BYTES = 1 << 20
"""Of a request: the environment, mostly."""


def serve() -> None:
    """Fork a process for each request. Returns in those, once their script has ended; never in the server."""
    die_with_parent(signal.SIGKILL)
    channel = socket.socket(fileno=int(sys.argv[1]))
    env, imports = dict(os.environ), None
    if sys.argv[2:] == [LAUNCHES]:
        imports = Imports(OWN_VARIABLES, {*sys.modules})
        imports.base()
        imports.end_notes()
        problem = import_all(_LAUNCHER)
    else:
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
            request = json.loads(message)
            if imports is None or not _fork_workers_from(imports, env):
                _begin(parent=parent, **request)
            return
        channel.send(json.dumps({"pid": pid}).encode())
        _, status = os.waitpid(pid, 0)
        channel.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
    os._exit(0)


def _fork_workers_from(imports: Imports, env: dict[str, str]) -> bool:
    """Make a child that forks this process's workers. Whether this is one of those workers, which has done its work."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = os.getpid()
    if pid := os.fork():
        theirs.close()
        take_ready_made(pid, ours, env)
        return False
    ours.close()
    os.setsid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    del sys.path[: puts_folder_first()]  # of this interpreter's -c; the worker gets its script's
    execute(*answer(agent, theirs, imports))
    return True


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
