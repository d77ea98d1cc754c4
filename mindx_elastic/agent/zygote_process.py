"""The zygote itself: a process of the agent's that has imported what workers import, and forks a worker for each
request. `zygote` is the agent's side of it.

::

    python OPTIONS -c COMMAND AGENT_PID DESCRIPTOR

The worker is a child of the agent. The zygote forks twice; the process in between ends at once, and the agent, which is
a subreaper at that moment, adopts the orphan. The worker then ties itself to the agent as `child` does, tells its
process id and waits for the agent's word. Whatever goes wrong before that costs nothing: the agent starts a fresh
interpreter.

On the channel, a packet each, the agent asks: ``fork`` with four descriptors (the request's own stream, and the
worker's stdin, stdout and stderr), ``preload`` with one (a stream with the names). The zygote reports what it has
become.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import select
import signal
import site
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Collection, ItemsView, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mindx_elastic.agent.child import tie
from mindx_elastic.core.forking import BASE_MODULES, freeze, import_all, num_threads, spoilt
from mindx_elastic.core.forking import seed_at_random as seed_anew
from mindx_elastic.core.script import prepare, puts_folder_first, script_folder
from mindx_elastic.errors import UsageError

__all__ = ["COMMAND", "FORK", "MOST_BYTES", "OWN_VARIABLES", "PRELOAD", "READY", "Imports", "answer", "serve"]

OWN_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "MINDX_ATTEMPT", "MINDX_REJOIN", "MINDX_JOB_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Each worker, or each attempt, has its own values: an import that reads them cannot be shared."""

COMMAND = (
    "import sys; began = {*sys.modules}; del sys.path[:not getattr(sys.flags, 'safe_path', sys.flags.isolated)]; "
    "from mindx_elastic.agent.zygote_process import serve; exec(*serve(vars().pop('began')))"
)
"""The folder that ``-c`` puts on the path is none of the worker's."""
FORK, PRELOAD, READY = b"fork", b"preload", b"ready\n"
MOST_BYTES = 1 << 16
_ADOPTED_S = 10.0
_ADOPTED_POLL_S = 0.0002
_PRELOAD_S = 0.05
"""How long the zygote imports before it looks for requests again, apart from a single module's import."""


def serve(began: Collection[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Fork a worker for each request. Returns in those, with what they are to run; never in the zygote.

    `began`: the modules that every interpreter begins with."""
    agent, channel = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    tie(agent, signal.SIGKILL)
    imports = Imports(began)
    imports.base()
    freeze()
    return answer(agent, channel, imports)


def answer(agent: int, channel: socket.socket, imports: Imports) -> tuple[types.CodeType, dict[str, Any]]:
    """As `serve`, where everything has been imported."""
    channel.send(imports.report())
    while True:
        if imports.waiting and not select.select([channel], [], [], 0)[0]:
            if imports.go_on(_PRELOAD_S):
                freeze()
                channel.send(imports.report())
            continue
        message, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, 4)
        if not message:
            os._exit(0)
        if message == PRELOAD:
            with socket.socket(fileno=descriptors[0]) as stream:
                imports.waiting += _read_json(stream)
            continue
        if _fork_orphan(descriptors):
            channel.close()
            return _begin(agent, descriptors, imports)


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


# --- what is imported ---


_LOOKS_FOR = {"tqdm.utils": "TQDM_"}
"""Modules that go through the whole environment at their import, for variables that begin so. torch imports tqdm where
it is installed."""


class _Environment(type(os.environ)):  # type: ignore[misc]
    """`os.environ` that notes which variables are read."""

    def items(self) -> ItemsView[str, str]:
        prefix = _LOOKS_FOR.get(sys._getframe(1).f_globals.get("__name__", ""))
        if prefix is None:
            return super().items()  # type: ignore[no-any-return]
        return {name: self[name] for name in super().__iter__() if name.startswith(prefix)}.items()

    def __getitem__(self, name: str) -> str:
        _read.add(name)
        return str(super().__getitem__(name))

    def __iter__(self) -> Iterator[str]:
        _read.add("*")
        yield from super().__iter__()


_read: set[str] = set()


class Imports:
    """What the zygote has imported, and what came of it."""

    def __init__(self, began: Collection[str]) -> None:
        """`began`: see `serve`."""
        self.waiting: list[str] = []
        self._problem = ""
        self._began = set(began)
        self._began_with = dict(os.environ)
        self._folders = _installed()
        self._fds = _fds()
        self._count = 1
        os.environ.__class__ = _Environment

    def base(self) -> None:
        """What all trainings import."""
        try:
            self._problem = import_all(BASE_MODULES)
            self._count = num_threads()
            self._problem = self._problem or self._side_effect("torch")
        except Exception as error:
            self._problem = f"the import fails there: {type(error).__name__}: {error}"

    def go_on(self, seconds: float) -> bool:
        """Import what is waiting, for so long. Whether all is done, or no more may be imported."""
        end = time.monotonic() + seconds
        while self.waiting and not self._problem and time.monotonic() < end:
            name = self.waiting.pop(0)
            if name in sys.modules or not self._is_installed(name):
                continue
            with suppress(Exception):  # the worker, which could import it, does so again
                importlib.import_module(name)
            self._problem = spoilt(self._count, name) or self._side_effect(name)
        if self._problem:
            self.waiting.clear()
        return not self.waiting

    def report(self) -> bytes:
        content = {"problem": self._problem, "read": sorted(_read)}
        return json.dumps(content).encode()

    def _side_effect(self, what: str) -> str:
        """Why another process would not have become the same by this import."""
        if own := sorted(_read & {*OWN_VARIABLES, "*"}):
            return f"importing {what} reads {'the whole environment' if own == ['*'] else ', '.join(own)}"
        if fds := _fds() - self._fds:
            targets = sorted(filter(None, map(_target, fds)))
            if targets:
                return f"importing {what} opens {', '.join(targets)}"
        return ""

    def _is_installed(self, name: str) -> bool:
        """Whether it comes from the standard library or an installed package, and from a file."""
        for part in (name.partition(".")[0], name):  # to look for a submodule imports the package
            try:
                spec = importlib.util.find_spec(part)
            except Exception:
                return False
            if spec is None or spec.origin is None or not spec.has_location or name.endswith("__main__"):
                return False
            if not os.path.realpath(spec.origin).startswith(self._folders):
                return False
        return True

    def shadowed(self, folder: str) -> str:
        """Why the worker would have imported something else: its script's folder has a module of that name."""
        if not puts_folder_first():
            return ""
        with suppress(OSError):
            names = {entry.partition(".")[0] for entry in os.listdir(folder)} & set(sys.modules) - self._began
            for name in sorted(names):
                there = importlib.machinery.PathFinder.find_spec(name, [folder])
                here = getattr(sys.modules[name], "__file__", None)
                if there is None or (there.origin is None and here is not None):
                    continue  # a folder is a module only where nothing else is
                if here is None or there.origin is None or not os.path.samefile(there.origin, here):
                    return f"{folder} has its own module {name}"
        return ""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` with the changes that imports have made."""
        now, found = dict(os.environ), dict(env)
        for name in now.keys() | self._began_with.keys():
            if now.get(name) != self._began_with.get(name):
                if name in now:
                    found[name] = now[name]
                else:
                    found.pop(name, None)
        return found


def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    with suppress(AttributeError):  # an old virtualenv's
        folders |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)


def _fds() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if _target(int(name))}


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # it was that of the folder that has just been listed
        return ""


# --- the worker ---


def _begin(agent: int, descriptors: Sequence[int], imports: Imports) -> tuple[types.CodeType, dict[str, Any]]:
    """Make this process the worker that is asked for."""
    stream = socket.socket(fileno=descriptors[0])
    os.setsid()
    request: dict[str, Any] = _read_json(stream)
    os.environ.__class__ = _Environment.__base__
    if "linecache" in sys.modules:  # Python 3.13 puts the zygote's own `-c` line there, for tracebacks
        sys.modules["linecache"].cache.pop("<string>", None)
    env = imports.environment(request["env"])
    os.environ.clear()
    os.environ.update(env)
    command: list[str] = request["command"]
    prepared = None
    try:
        os.chdir(request["cwd"])
        if shadow := imports.shadowed(script_folder(command)):
            _refuse(stream, shadow)
        if puts_folder_first():
            sys.path.insert(0, "")
        if command[0] != "-m":  # that may run code of the program's already
            prepared = prepare(command)
    except Exception as error:  # a fresh interpreter says it in its own words
        _refuse(stream, f"{type(error).__name__}: {error}")
    seed_anew()
    _wait_for(agent)  # the process in between has to be gone by then, which takes as long as all of this
    if problem := tie(agent, signal.SIGTERM):
        _refuse(stream, f"the kernel does not tie the worker to the agent: {problem}")
    stream.sendall(b"%d\n" % os.getpid())
    if stream.recv(len(READY)) != READY:
        os._exit(1)  # the agent has given up, or is gone
    stream.close()
    for target, fd in enumerate(descriptors[1:]):
        os.dup2(fd, target)
        os.close(fd)
    _adjust_streams()
    time.tzset()
    sys.orig_argv = [*request["interpreter"], *command]
    _show(sys.orig_argv)
    if request["hook"]:
        module, _, function = request["hook"].partition(":")
        getattr(importlib.import_module(module), function)()
    if prepared is None:
        try:
            prepared = prepare(command)
        except UsageError as error:
            sys.exit(f"{sys.executable}: {error}")
    return prepared


def _wait_for(agent: int) -> None:
    """Until the agent has adopted this process."""
    end = time.monotonic() + _ADOPTED_S
    while os.getppid() != agent:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(_ADOPTED_POLL_S)


def _refuse(stream: socket.socket, reason: str) -> None:
    stream.sendall(f"{reason}\n".encode(errors="replace"))
    os._exit(1)


def _read_json(stream: socket.socket) -> Any:
    """One line; nothing after it has been sent yet."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = stream.recv(1 << 20)
        if not part:
            os._exit(1)
        parts.append(part)
    return json.loads(b"".join(parts))


def _adjust_streams() -> None:
    """Buffer as the interpreter does at its start: it was begun with other files. The objects stay the same, since log
    handlers hold them, and so does what `sitecustomize` or an import has put in their place."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper) and not stream.write_through:  # -u or PYTHONUNBUFFERED
            stream.reconfigure(line_buffering=stream is sys.__stderr__ or stream.isatty())


def _show(command: Sequence[str]) -> None:
    """Have the process list (``ps``, ``/proc/PID/cmdline``) show the worker's own command line.

    Overwrites what the kernel has put there for the zygote, whose command line is as long.
    """
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        begin, end = map(int, fields[45:47])  # arg_start, arg_end
        if 0 < begin < end:
            text = b"\0".join(map(os.fsencode, command))
            ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)
