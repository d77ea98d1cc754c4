"""A warm spare: a process that has run the program as far as it goes without knowing which rank it is.

A spare is forked before any rank has died. It imports what the program imports, builds the model and wraps it in DDP,
and waits where the program first needs to know its rank: it reads ``RANK`` or ``LOCAL_RANK``, asks torch for the rank,
makes a group, enters a guard. When a rank dies it is told which one it is, and goes on from there as a joiner (see
`joiner`).

Making the default group does not need the rank yet: the spare gets a provisional one, which is replaced when it is
told. Only DDP may hold it by then. A spare that finds otherwise ends with `UNFIT`, and another process is started.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TextIO

from mindx_elastic.core.looks import table_of
from mindx_elastic.rejoin import joiner

__all__ = [
    "PIPE_VARIABLE",
    "UNFIT",
    "WAITS",
    "end_unfit",
    "environment_of_spare",
    "is_waiting",
    "know_rank",
    "prepare",
    "promotion",
    "redirect",
]

UNFIT = 76
"""Exit code of a spare that cannot be this job's rank after all."""
PIPE_VARIABLE = "MINDX_SPARE"
"""The named pipe on which a spare is told which rank it is."""
WAITS = ".waits"
"""Ending of a file next to the pipe, which is there once the spare waits on it."""
_LACKS = frozenset(
    {"RANK", "LOCAL_RANK", "ROLE_RANK", "MINDX_REJOIN", "TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES"}
)
"""Variables of which each rank may have its own value: where one of them is not set, a spare waits to be told."""
_ASKING = ("get_rank", "get_group_rank", "get_node_local_rank", "new_group", "new_subgroups")
_undo: list[Callable[[], None]] = []
_waiting = False
_is_building: list[bool] = []
_make: list[Callable[[], None]] = []
"""Makes the default group once more, with the rank."""
_replaced: dict[Any, Callable[[], Any]] = {}
"""The provisional group, and how to get the one in its place."""


def prepare() -> None:
    """Before the program runs, in a process without a rank."""
    global _waiting
    _waiting = True
    joiner.prepare()
    _watch_environment()
    _watch_torch()


def environment_of_spare(common: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables of a spare: `common` and a rank's `own`, without those that are that rank's alone."""
    return {name: value for name, value in {**common, **own}.items() if name not in own or name not in _LACKS}


def promotion(variables: Mapping[str, str], stdout: str, stderr: str) -> str:
    """What a spare is sent: the environment variables that it lacks, and the files that it goes on writing to; empty:
    where it has written to so far."""
    return json.dumps([dict(variables), stdout, stderr]) + "\n"


def is_waiting() -> bool:
    """Whether this is a spare that does not know its rank yet."""
    return _waiting


def know_rank() -> None:
    """Wait until the rank is known, if this is a spare. Main thread."""
    global _waiting
    if not _waiting or _is_building:
        return
    _waiting = False
    pipe = os.environ.pop(PIPE_VARIABLE)
    with open(pipe + WAITS, "w"):
        pass
    variables, *outputs = json.loads(_read_pipe(pipe))
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        if path:
            redirect(stream, path)
    while _undo:
        _undo.pop()()
    os.environ.update(variables)
    joiner.hold()
    if _make:
        _replace_default_group()


def _read_pipe(path: str) -> str:
    with open(path) as pipe:  # waits until somebody writes
        return pipe.readline()


def redirect(stream: TextIO, path: str) -> None:
    """Let `stream` of this process write to the file `path` from now on. Raises OSError."""
    stream.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    os.dup2(fd, stream.fileno())
    os.close(fd)


def _watch_environment() -> None:
    environment: Any = type(os.environ)
    plain = environment.__getitem__

    def look(self: Any, key: str) -> str:
        try:
            found: str = plain(self, key)
        except KeyError:
            if self is not os.environ or key not in _LACKS or not _waiting:
                raise
            know_rank()
            found = plain(self, key)
        return found

    environment.__getitem__ = look
    _undo.append(lambda: setattr(environment, "__getitem__", plain))


def _watch_torch() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    changed = {name: _asking(getattr(c10d, name)) for name in _ASKING if hasattr(c10d, name)}
    changed["init_process_group"] = _make_provisional(c10d.init_process_group)
    changed["get_world_size"] = _with_world_size(c10d.get_world_size)
    for name, value in changed.items():
        original = getattr(c10d, name)
        for module in [m for m in sys.modules.values() if (table_of(m) or {}).get(name) is original]:
            _patch(module, name, value)
    rank: Any = dist.ProcessGroup.rank
    _patch(dist.ProcessGroup, "rank", _asking(rank))


def _patch(owner: Any, name: str, value: Any) -> None:
    before = vars(owner)[name]
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, before))


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ask(*arguments: Any, **named: Any) -> Any:
        provisional = arguments[:1]
        know_rank()
        if provisional and provisional[0] in _replaced:  # a method of the group that has just been replaced
            return function(_replaced[provisional[0]](), *arguments[1:], **named)
        return function(*arguments, **named)

    return ask


def _with_world_size(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def get_world_size(group: Any = None) -> int:
        return int(os.environ["WORLD_SIZE"]) if group is None and _waiting else function(group)

    return get_world_size


def _make_provisional(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def init_process_group(backend: Any = None, init_method: Any = None, *arguments: Any, **named: Any) -> None:
        import torch.distributed as dist

        tells_rank = arguments or {"rank", "world_size", "store"} & named.keys()
        if not _waiting or tells_rank or init_method not in (None, "env://"):
            know_rank()
            function(backend, init_method, *arguments, **named)
            return
        world_size = int(os.environ["WORLD_SIZE"])
        _is_building.append(True)  # torch itself asks, for its log
        try:
            function(backend, store=dist.HashStore(), rank=0, world_size=world_size, **named)
        finally:
            _is_building.pop()
        _make.append(lambda: dist.init_process_group(backend, init_method, **named))

    return init_process_group


def _replace_default_group() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel

    from mindx_elastic.capture.ddp import find_objects
    from mindx_elastic.rejoin import groups

    provisional = c10d._get_default_group()
    modules = find_objects(DistributedDataParallel)
    if said := groups.why_held(provisional, modules):
        end_unfit(said)
    _replaced[provisional] = c10d._get_default_group
    dist.destroy_process_group()
    _make.pop()()
    for module in modules:
        module._update_process_group(c10d._get_default_group())


def end_unfit(reason: str) -> NoReturn:
    """This process was a spare, and cannot be a rank of the job after all; it has told the others nothing yet."""
    sys.stderr.write(f"mindx-elastic: this spare cannot take a rank: {reason}\n")
    sys.stderr.flush()
    os._exit(UNFIT)
