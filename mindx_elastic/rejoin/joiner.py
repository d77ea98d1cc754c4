"""A new process for a dead rank: it runs the program from its beginning, while the other ranks are far ahead.

Until it enters its guard, the program builds its objects: process groups, modules, DDP. The other ranks take no part in
that, so its groups are given backends without peers, which do nothing (torch's *fake* backend). That is enough for
what DDP does when it wraps a module. A collective of the program's own would give a wrong result, so it is refused,
and the job is restarted; a barrier is passed.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mindx_elastic.agreement.connect import open_connection
from mindx_elastic.alarm.signals import hold_signals
from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import table_of
from mindx_elastic.rejoin.board import Board, board_key

__all__ = ["end_setup", "hold", "prepare"]

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("all_reduce_coalesced", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "irecv", "isend", "batch_isend_irecv", "recv", "recv_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list"),
)
_PASSED = ("barrier", "monitored_barrier")
_FUNCTIONAL = "torch.distributed._functional_collectives"
_FUNCTIONAL_COLLECTIVES = (
    *("broadcast", "all_reduce", "all_reduce_coalesced", "all_gather_single", "all_gather_single_autograd"),
    *("all_gather_single_coalesced", "all_gather_tensor", "all_gather_tensor_autograd"),
    *("all_gather_into_tensor_coalesced", "reduce_scatter_single", "reduce_scatter_single_autograd"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_autograd"),
    *("reduce_scatter_tensor_coalesced", "all_to_all_single", "all_to_all_single_autograd", "permute_tensor"),
)
"""Those of DTensors: ``full_tensor()``, ``redistribute()``."""
_undo: list[Callable[[], None]] = []


class _SetupCollective(BaseException):
    """The program has called a collective before its guard; the process ends, and the job is restarted."""


def prepare() -> None:
    """Make `init_process_group` and `new_group` of this process build groups without peers. Before the program runs."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend
    from torch.distributed import distributed_c10d as c10d

    from mindx_elastic.rejoin.groups import keep_timeout

    helper = c10d._new_process_group_helper

    def new_group_without_peers(
        group_size: int, group_rank: int, global_ranks: list[int], backend: Any, store: Any, *more: Any, **named: Any
    ) -> Any:
        kind = str(backend)
        made = helper(group_size, group_rank, global_ranks, c10d.Backend("fake"), store, *more, **named)
        handle = made[0] if isinstance(made, tuple) else made
        if handle in c10d._world.pg_map:  # else this rank is not in the group
            c10d._world.pg_map[handle] = (kind, c10d._world.pg_map[handle][1])
            c10d._world.pg_backend_config[handle] = str(c10d.BackendConfig(c10d.Backend(kind)))
            keep_timeout(str(c10d._world.pg_names[handle]), named.get("timeout"))
        return made

    if RejoinSettings.from_env().generation:  # a spare does not know its own yet
        hold()
    _patch(c10d, "_new_process_group_helper", new_group_without_peers)
    _patch(c10d, "_store_based_barrier", lambda *arguments, **named: None)
    instead = {name: _refusing(f"torch.distributed.{name}()") for name in _COLLECTIVES}
    _patch_all(c10d, {**instead, **dict.fromkeys(_PASSED, lambda *arguments, **named: None)})
    if _FUNCTIONAL in sys.modules:
        told = {name: _refusing(f"a collective of DTensors ({name})") for name in _FUNCTIONAL_COLLECTIVES}
        _patch_all(sys.modules[_FUNCTIONAL], told)


def hold() -> None:
    """From now on a SIGUSR1 is answered when the guard is open. Somebody asks the job to stop with it, and the end of
    this process would restart it. Main thread."""
    hold_signals([signal.SIGUSR1])


def _patch_all(home: Any, instead: Mapping[str, Callable[..., Any]]) -> None:
    """Put others in the place of the functions of `home`, until `end_setup`: there, in torch.distributed, and in all
    modules but torch's own that have imported them. A module that imports one meanwhile keeps what it got, which does
    what torch's does after `end_setup`."""
    originals = {name: vars(home)[name] for name in instead if name in vars(home)}
    wrapped = {name: _until_end(original, instead[name]) for name, original in originals.items()}
    for key, module in list(sys.modules.items()):
        if key.startswith(("torch.", "mindx_elastic.")) and key not in (home.__name__, "torch.distributed"):
            continue
        content = table_of(module) or {}
        for name in originals.keys() & content.keys():
            if content[name] is originals[name]:
                _patch(module, name, wrapped[name])


def _until_end(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def in_setup(*arguments: Any, **named: Any) -> Any:
        return (instead if _undo else original)(*arguments, **named)

    return in_setup


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **named: Any) -> Any:
        text = f"the program calls {what} before its guard, and the other ranks take no part in that"
        _tell(text)
        raise _SetupCollective(text)

    return refuse


def _tell(text: str) -> None:
    """Here, and on the board: the agent says it as the reason of the restart."""
    from torch.distributed import PrefixStore

    logger.error("%s", text)
    settings, ranks, agent = RejoinSettings.from_env(), RankInfo.from_env(), AgentInfo.from_env()
    if agent is None:
        return
    try:
        store: Any = PrefixStore(f"mindx/rejoin/{agent.attempt}", open_connection())
        scope = f"{agent.attempt}/{settings.generation}"
        Board(store, key=board_key(), scope=scope, writer=ranks.rank).refuse(settings.generation, ranks.rank, text)
    except Exception as error:
        logger.debug("the store does not take the reason: %s", error)


def _patch(owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, before))


def end_setup() -> None:
    """The program has built its objects: from here on groups are real ones. Before they get their connections."""
    while _undo:
        _undo.pop()()
