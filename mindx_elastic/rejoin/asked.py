"""Where the program has asked for its rank or for the number of ranks: what it has worked out from that may be stale in
a process that goes on as a rank of a smaller job (see `guard.fewer_in_place`).

What can be asked is watched from before the program's first line on: torch.distributed's functions, collectives whose
result depends on how many take part, and variables of the environment. An answer given *outside of the function* of
``guard.run`` may be kept in anything. One given in it is worked with anew when the function is called again, unless
the program keeps it from one call to the next (a sampler that is made once, a cached function). So who asks at the
*opening* of a call, which is all before its first update, has to do so at the opening of the next one as well, and who
asks later must have done so in more than one step. Who asks is told from the lines of all the program's calls.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from mmap import mmap
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from mindx_elastic.config import ShrinkSettings
from mindx_elastic.core.script import run

__all__ = ["ATTEMPT", "RANK", "SIZE", "Asked", "current", "main", "note", "prepare", "watch"]

RANK, SIZE, ATTEMPT = "the rank", "the number of ranks", "the number of restarts"
"""What is asked for. The result of a collective is of a number of ranks."""
_KINDS = (RANK, SIZE, ATTEMPT)
Place: TypeAlias = "tuple[tuple[str, int], ...]"
"""Files and lines, the innermost first."""

_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "RANK_ID", "DEVICE_ID"), RANK),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), RANK),
    **dict.fromkeys(("PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK"), RANK),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "RANK_SIZE"), SIZE),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"), SIZE),
    "MINDX_PLACES": SIZE,
    **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "MINDX_ATTEMPT"), ATTEMPT),
}
_VARIABLES: Mapping[Any, str] = {**_NAMES, **{name.encode(): what for name, what in _NAMES.items()}}
_FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(("get_rank", "get_node_local_rank", "get_group_rank", "get_global_rank"), RANK),
    **dict.fromkeys(("get_world_size", "get_process_group_ranks", "all_gather", "all_gather_coalesced"), SIZE),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_object", "all_reduce", "all_reduce_coalesced"), SIZE),
    **dict.fromkeys(("all_to_all", "all_to_all_single", "gather", "gather_object", "reduce", "reduce_scatter"), SIZE),
    **dict.fromkeys(("reduce_scatter_tensor", "scatter", "scatter_object_list", "recv", "irecv"), SIZE),
    **dict.fromkeys(("all_gather_single", "reduce_scatter_single", "recv_object_list", "rendezvous"), SIZE),
}
_C10D = "torch.distributed.distributed_c10d"
_HOMES = frozenset({_C10D, "torch.distributed._functional_collectives"})
_METHODS: Mapping[str, str] = {"rank": RANK, "size": SIZE}
"""Of process groups."""
_HANDS_ON = frozenset(
    {
        *("torch.utils.data", "torch.distributed.c10d_logger", "mindx_elastic.data", "mindx_elastic.rejoin.joiner"),
        *("torch.distributed.nn", "torch.distributed.collective_utils", "torch.distributed.device_mesh"),
        *("torch.distributed.elastic.utils.data", "torch.autograd.function", "mindx_elastic.cluster.group"),
        *("os", "collections", "functools", "contextlib"),
    }
)
"""Modules that ask for whoever has called them: samplers, loaders, meshes, ``os.environ.get``."""
_LIBRARIES = frozenset({"torch", "mindx_elastic"})
"""What these ask for themselves is theirs: DDP, groups, this package. They hear of another size."""
_SAMPLERS = "torch.utils.data.distributed"
_MOST_FRAMES, _MOST_PLACES = 64, 10_000


@dataclass
class _Times:
    """Of one place, and of what it asks for."""

    opening: int = 0
    """How often at the opening of a call, at most."""
    call: int = -1
    """The call that `now` is of."""
    now: int = 0
    """How often at the opening of this one."""
    steps: set[tuple[int, int]] = field(default_factory=set)
    """The first two steps after an opening: call, step."""

    @property
    def recurs(self) -> bool:
        """It is asked again and again, so that no answer is kept."""
        return len(self.steps) > 1


class Asked:
    """Of one process. Any thread asks; the rest is for the training thread."""

    def __init__(self) -> None:
        self._outside: dict[str, str] = {}
        self._times: dict[tuple[Place, str], _Times] = {}
        self._expected: dict[tuple[Place, str], _Times] = {}
        self._call = self._step = 0
        self._is_opening = self._has_too_many = False
        self._samplers: dict[int, weakref.ref[Any]] = {}
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._in_children = mmap(-1, len(_KINDS))
        """For each of them, whether a forked process has asked, which shares this memory: it is never told again."""

    def note(self, what: str, frame: FrameType | None) -> None:
        """What answers has been called from `frame`: the program asks for `what`, if it is the program."""
        place = _place(frame)
        if not place:
            return
        if os.getpid() != self._pid:
            self._in_children[_KINDS.index(what)] = 1
            return
        if not self._call or threading.get_ident() != self._thread:  # a thread outlives the function's calls
            self._outside.setdefault(what, _words(place))
            return
        times = self._times.get((place, what))
        if times is None:
            if len(self._times) >= _MOST_PLACES:
                self._has_too_many = True
                return
            times = self._times[place, what] = _Times()
        if not self._is_opening:
            self._note_sampler(frame)
            if not times.recurs:
                times.steps.add((self._call, self._step))
            return
        if times.call != self._call:
            times.call, times.now = self._call, 0
        times.now += 1
        times.opening = max(times.opening, times.now)

    def _note_sampler(self, frame: FrameType | None) -> None:
        """One that is made after the opening asks for itself."""
        while frame is not None and _kind(frame) is _Kind.HANDS_ON:
            if frame.f_globals.get("__name__") == _SAMPLERS and frame.f_code.co_name == "__init__":
                sampler = frame.f_locals["self"]
                self._samplers[id(sampler)] = weakref.ref(sampler)
            frame = frame.f_back

    def samplers(self) -> list[Any]:
        """Those that are made after an opening, with the number of ranks of then, and still live."""
        return [sampler for one in self._samplers.copy().values() if (sampler := one()) is not None]

    def enter(self) -> None:
        """The function of ``guard.run`` is about to be called, once more or for the first time."""
        self._call, self._step, self._is_opening = self._call + 1, 0, True

    def pass_boundary(self) -> None:
        """A step has ended."""
        self._step += 1

    def problem(self, *, rank_changes: bool) -> str:
        """Why this process may be stale when the number of ranks changes, and its rank or not; empty: it is not."""
        if self._has_too_many:
            return f"the program asks for its rank or for the number of ranks at more than {_MOST_PLACES} places"
        for what, has_asked in zip(_KINDS, self._in_children[:], strict=True):
            if has_asked and (what != RANK or rank_changes):
                return f"a process that the program has forked (a worker of a DataLoader?) has asked for {what}"
        for what, where in self._outside.copy().items():
            if what != RANK or rank_changes:
                return f"the program has asked for {what} outside of the function of guard.run ({where})"
        for (place, what), times in self._times.items():
            if (what != RANK or rank_changes) and not times.opening and not times.recurs:
                return f"the program has asked for {what} in one step only, and may keep the answer ({_words(place)})"
        return ""

    def begin_anew(self, *, rank_changes: bool) -> None:
        """The next call is the first one with another number of ranks: see `end_opening`."""
        known = self._times
        self._expected = {
            key: times for key, times in known.items() if not times.recurs and (key[1] != RANK or rank_changes)
        }
        # A rank that stays is not asked for again where the answer is kept, and may change the next time.
        self._times = {} if rank_changes else {key: times for key, times in known.items() if key[1] == RANK}

    def lines(self) -> set[tuple[str, int]]:
        """All lines, with their files, that were under way when something was asked in the function."""
        return {line for place, _ in self._times.copy() for line in place}

    @property
    def is_opening(self) -> bool:
        """No update has been made in this call yet."""
        return self._is_opening

    def end_opening(self) -> str:
        """Before the first update of a call. Returns what the program keeps of the answers that it was given in the
        calls before, with another number of ranks; empty: nothing."""
        self._is_opening = False
        expected, self._expected = self._expected, {}
        for key, times in expected.items():
            place, what = key
            if key not in self._times or self._times[key].opening < times.opening:
                return f"the program has not asked again for {what}, and may keep the last answer ({_words(place)})"
        return ""


_asked: Asked | None = None


_listened: set[str] = set()
"""Modules of torch that are listened to."""


def current() -> Asked | None:
    """Of this process; None: it was not watched from the program's beginning."""
    return _asked if _listened >= _HOMES & sys.modules.keys() else None


def note(*what: str) -> None:
    """The function of this package that calls this one answers its own caller with what depends on `what`."""
    if _asked is not None:
        for each in what:
            _asked.note(each, sys._getframe(2))


def watch(asked: Asked) -> None:
    """Let `asked` hear of every question from now on. Before the program runs, once a process. Torch is not imported
    for it: at its import it reads variables that a program may set first."""
    _listen_to_variables(asked)
    for name in sorted(_HOMES & sys.modules.keys()):
        _listen_to_module(asked, sys.modules[name])
    sys.meta_path.insert(0, _AtImport(asked))


class _AtImport(MetaPathFinder):
    """Listens to torch's functions as soon as there are any."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _HOMES else None
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _listen_to_module(self._asked, module)

        loader.exec_module = exec_module
        return spec


def _listen_to_module(asked: Asked, home: Any) -> None:
    is_first = home.__name__ == _C10D
    for name, what in (_FUNCTIONS if is_first else dict.fromkeys(_public(home), SIZE)).items():
        function = inspect.unwrap(vars(home).get(name))
        if isinstance(function, types.FunctionType):
            if function.__code__.co_freevars:
                return  # of a torch that is not known: see `current`
            _listen(function, functools.partial(asked.note, what))
    for name, what in _METHODS.items() if is_first else ():
        _listen_to_method(home.ProcessGroup, name, functools.partial(asked.note, what))
    _listened.add(home.__name__)


def _is_compiling() -> bool:
    """Whether torch.compile goes through this, which leaves out what it cannot compile then. A process that has
    compiled something does not go on with fewer ranks in any case."""
    if "torch._dynamo" not in sys.modules:
        return False
    import torch

    return torch.compiler.is_compiling()


def _public(home: Any) -> list[str]:
    """Names of the functions that a module has defined."""
    own = ((name, getattr(value, "__module__", "")) for name, value in vars(home).items() if name[:1] != "_")
    return [name for name, module in own if module == home.__name__]


def _listen(function: types.FunctionType, tell: Callable[[FrameType | None], None]) -> None:
    """Let a function tell of each of its calls. The object stays the same: the program may have imported it, and the
    compiler knows it by its identity."""
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]

    def answer(*arguments: Any, **named: Any) -> Any:
        if not _is_compiling():
            tell(sys._getframe(2))
        return original(*arguments, **named)

    key, code = f"_mindx_{function.__name__}", function.__code__
    function.__globals__[key] = answer
    # File and line are for tracebacks and inspect.getsource.
    function.__code__ = _calls_answer.__code__.replace(
        co_names=(key,), co_name=code.co_name, co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
    )


_answer: Any = None


def _calls_answer(*arguments: Any, **named: Any) -> Any:
    """The code of all functions that are listened to, each with a name of its own in place of `_answer`."""
    return _answer(*arguments, **named)


def _listen_to_method(owner: Any, name: str, tell: Callable[[FrameType | None], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def answer(self: Any) -> Any:
        if not _is_compiling():
            tell(sys._getframe(1))
        return original(self)

    setattr(owner, name, answer)


def _listen_to_variables(asked: Asked) -> None:
    """Everything that reads a variable of `os.environ` or `os.environb` goes through this one method."""
    environment: Any = type(os.environ)
    original = environment.__getitem__

    def __getitem__(self: Any, key: Any) -> Any:  # noqa: N807
        if not _is_compiling() and (what := _VARIABLES.get(key)) is not None:
            asked.note(what, sys._getframe(1))
        return original(self, key)

    environment.__getitem__ = __getitem__


class _Kind(Enum):
    """Of a module that asks."""

    PROGRAM = "of the program"
    HANDS_ON = "asks for whoever has called it"
    LIBRARY = "asks for itself"


def _place(frame: FrameType | None) -> Place:
    """Of the program's call; empty: a library asks for itself."""
    while frame is not None and _kind(frame) is _Kind.HANDS_ON:
        frame = frame.f_back
    if frame is None or _kind(frame) is _Kind.LIBRARY:
        return ()
    found = []
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if _kind(frame) is not _Kind.LIBRARY:
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _kind(frame: FrameType) -> _Kind:
    return _kind_of(str(frame.f_globals.get("__name__", "")))


@functools.lru_cache(maxsize=4096)
def _kind_of(module: str) -> _Kind:
    parts = module.split(".")
    names = {".".join(parts[:number]) for number in range(1, len(parts) + 1)}
    if names & _HANDS_ON:
        return _Kind.HANDS_ON
    return _Kind.LIBRARY if names & _LIBRARIES else _Kind.PROGRAM


def _words(place: Place) -> str:
    path, line = place[0]
    return f"{Path(path).name}:{line}"


def prepare() -> None:
    """In a process forked for it, before the program runs."""
    global _asked
    if _asked is None and ShrinkSettings.keeps_processes():
        _asked = Asked()
        watch(_asked)


def main() -> None:
    """``python -m mindx_elastic.rejoin.asked SCRIPT ARGUMENTS``: run the program, watched."""
    prepare()
    run(sys.argv[1:])


if __name__ == "__main__":
    from mindx_elastic.rejoin import asked  # noqa: PLW0406 - under its own name

    asked.main()
