"""The zygote itself: a process of the agent's that has imported what all trainings import, and forks a worker for each
request. `zygote` is the agent's side of it.

::

    python OPTIONS -c COMMAND AGENT_PID DESCRIPTOR

The worker is a child of the agent. The zygote forks twice; the process in between ends at once, and the agent, which is
a subreaper at that moment, adopts the orphan. The worker then ties itself to the agent as `child` does, tells its
process id and waits for the agent's word. Whatever goes wrong before that costs nothing: the agent starts a fresh
interpreter.

A fork is as good as a fresh interpreter as long as nothing has happened but imports: no thread, no open file or device,
no number drawn. What a fresh interpreter begins with by chance, the worker draws again, but for the seed of Python's
hashes.

On the channel the zygote says once that it is ready, or why it never will be. Each packet after that is a request, with
four descriptors: the stream on which the worker answers, and its stdin, stdout and stderr.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from mindx_elastic.agent.child import tie
from mindx_elastic.config import Settings
from mindx_elastic.core.script import prepare, puts_folder_first, script_folder
from mindx_elastic.errors import UsageError

__all__ = ["COMMAND", "MOST_BYTES", "READY", "is_own_variable", "serve"]

_OWN_PREFIXES = ("MINDX_", "TORCHELASTIC_")
_OWN_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
        "CUDA_VISIBLE_DEVICES",  # read when CUDA is initialised, which no import has done
    }
)
_MODULES = (
    "torch._dynamo",  # the first step of an optimizer imports it
    "torch.distributed",
    "torch.utils.data",
    "mindx_elastic.data",
    "mindx_elastic.guard.guard",
    "mindx_elastic.train",
)
"""What nearly all trainings import."""
COMMAND = (
    "import sys; began = {*sys.modules}; del sys.path[:not getattr(sys.flags, 'safe_path', sys.flags.isolated)]; "
    "from mindx_elastic.agent.zygote_process import serve; exec(*serve(vars().pop('began')))"
)
"""The folder that ``-c`` puts on the path is none of the worker's."""
READY = b"ready"
MOST_BYTES = 1 << 20
"""Of a packet: mostly the script's arguments."""
_ADOPTED_S = 10.0
_ADOPTED_POLL_S = 0.0002


def is_own_variable(name: str) -> bool:
    """Whether each worker, or each attempt, may have its own value. No import of the zygote's reads it."""
    return name in _OWN_VARIABLES or (name.startswith(_OWN_PREFIXES) and name != "MINDX_PRELOAD")


def serve(began: Collection[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Fork a worker for each request. Returns in those, with what they are to run; never in the zygote.

    `began`: the modules that every interpreter begins with."""
    agent, channel = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    tie(agent, signal.SIGKILL)
    try:
        problem = _import_all()
    except Exception as error:
        problem = f"the import fails there: {type(error).__name__}: {error}"
    channel.send(problem.encode(errors="replace") or READY)
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, 4)
        if not request:
            os._exit(0)
        if _fork_orphan(descriptors):
            channel.close()
            return _begin(agent, json.loads(request), descriptors, began)


def _import_all() -> str:
    """Why a fork of this process is not what a fresh interpreter is; empty: it is. Raises what the imports raise."""
    gc.disable()  # an eighth of the time would go into looking for garbage in what stays
    import numpy  # noqa: F401

    # OpenBLAS starts its threads here. It ends them before a fork and starts them again where they are needed.
    count, opened = _num_threads(), _open_files()
    for name in (*_MODULES, *Settings.from_env().preload):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each collection of a forked process copies the memory that it shares
    gc.enable()
    if _num_threads() > count:
        return "an import has started threads"
    # Also devices: a process that has only counted those of CUDA cannot use them after a fork.
    return "".join(f"an import has opened {path}" for path in sorted(_open_files() - opened)[:1])


def _num_threads() -> int:
    """The threads of this process, also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def _open_files() -> set[str]:
    """The paths of what this process holds open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder that has just been listed
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def _fork_orphan(descriptors: Sequence[int]) -> bool:
    """Whether this is the new process."""
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            return True
        os._exit(0)
    for fd in descriptors:
        os.close(fd)
    os.waitpid(between, 0)
    return False


# --- the worker ---


def _begin(
    agent: int, request: dict[str, Any], descriptors: Sequence[int], began: Collection[str]
) -> tuple[types.CodeType, dict[str, Any]]:
    """Make this process the worker that is asked for."""
    os.setsid()
    command: list[str] = request["command"]
    if "linecache" in sys.modules:  # Python 3.13 puts the zygote's own `-c` line there, for tracebacks
        sys.modules["linecache"].cache.pop("<string>", None)
    for name in filter(is_own_variable, list(os.environ)):
        del os.environ[name]
    os.environ.update(request["env"])
    prepared = None
    with socket.socket(fileno=descriptors[0]) as stream:
        try:
            os.chdir(request["cwd"])
            if shadow := _shadowed(script_folder(command), began):
                _refuse(stream, shadow)
            if puts_folder_first():
                sys.path.insert(0, "")
            if command[0] != "-m":  # that may run code of the program's already
                prepared = prepare(command)
        except Exception as error:  # a fresh interpreter says it in its own words
            _refuse(stream, f"{type(error).__name__}: {error}")
        _seed_at_random()
        _wait_for(agent)  # the process in between has to be gone by then, which takes as long as all of this
        if problem := tie(agent, signal.SIGTERM):
            _refuse(stream, f"the kernel does not tie the worker to the agent: {problem}")
        stream.sendall(b"%d" % os.getpid())
        if stream.recv(len(READY)) != READY:
            os._exit(1)  # the agent has given up, or is gone
    for target, fd in enumerate(descriptors[1:]):
        os.dup2(fd, target)
        os.close(fd)
    _adjust_streams()
    sys.orig_argv = [*request["interpreter"], *command]
    if request["hook"]:
        module, _, function = request["hook"].partition(":")
        getattr(importlib.import_module(module), function)()
    if prepared is None:
        try:
            prepared = prepare(command)
        except UsageError as error:
            sys.exit(f"{sys.executable}: {error}")
    return prepared


def _shadowed(folder: str, began: Collection[str]) -> str:
    """Why the worker would have imported something else: its script's folder has a module of that name."""
    if not puts_folder_first():
        return ""
    with suppress(OSError):
        names = {entry.partition(".")[0] for entry in os.listdir(folder)} & set(sys.modules) - set(began)
        for name in sorted(names):
            there = importlib.machinery.PathFinder.find_spec(name, [folder])
            here = getattr(sys.modules[name], "__file__", None)
            if there is None or (there.origin is None and here is not None):
                continue  # a folder is a module only where nothing else is
            if here is None or there.origin is None or not os.path.samefile(there.origin, here):
                return f"{folder} has its own module {name}"
    return ""


def _seed_at_random() -> None:
    """Draw again what imports have drawn, and forget what they have looked up in the environment."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None
    tempfile._name_sequence = None  # type: ignore[attr-defined]


def _wait_for(agent: int) -> None:
    """Until the agent has adopted this process."""
    end = time.monotonic() + _ADOPTED_S
    while os.getppid() != agent:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(_ADOPTED_POLL_S)


def _refuse(stream: socket.socket, reason: str) -> None:
    stream.sendall(reason.encode(errors="replace"))
    os._exit(1)


def _adjust_streams() -> None:
    """Buffer as the interpreter does at its start: it was begun with other files. The objects stay the same, since log
    handlers hold them, and so does what `sitecustomize` or an import has put in their place."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper) and not stream.write_through:  # -u or PYTHONUNBUFFERED
            stream.reconfigure(line_buffering=stream is sys.__stderr__ or stream.isatty())
