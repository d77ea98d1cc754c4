"""A new process in the place of a dead rank: it runs the program from its beginning, beside ranks that are far ahead.

Until it enters its guard, the program builds its objects: process groups, modules, DDP. The other ranks take no part in
that, so its groups are given backends without peers, which do nothing (torch's *fake* backend). That is enough for
what DDP does when it wraps a module. A collective of the program's own would give a wrong result, so it is refused, and
the job is restarted; a barrier is passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.script import run
from mindx_elastic.rejoin.member import Member

__all__ = ["end_setup", "main", "prepare"]

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("all_reduce_coalesced", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "irecv", "isend", "batch_isend_irecv", "recv", "recv_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list"),
)
_PASSED = ("barrier", "monitored_barrier")
_undo: list[Callable[[], None]] = []


class _SetupCollective(BaseException):
    """The program has called a collective before its guard; the process ends, and the job is restarted."""


def prepare() -> None:
    """Make `init_process_group` and `new_group` of this process build groups without peers. Before the program runs."""
    import torch.distributed as dist
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

    _patch(c10d, "_new_process_group_helper", new_group_without_peers)
    _patch(c10d, "_store_based_barrier", lambda *arguments, **named: None)
    for name in _COLLECTIVES:
        for owner in (c10d, dist):
            if hasattr(owner, name):
                _patch(owner, name, _refusing(name))
    for name in _PASSED:
        for owner in (c10d, dist):
            if hasattr(owner, name):
                _patch(owner, name, lambda *arguments, **named: None)


def _refusing(name: str) -> Callable[..., None]:
    def refuse(*arguments: Any, **named: Any) -> None:
        text = (
            f"the program calls torch.distributed.{name}() before its guard, and the other ranks take no part in that"
        )
        _tell(text)
        raise _SetupCollective(text)

    return refuse


def _tell(text: str) -> None:
    """Here, and on the board: the agent says it as the reason of the restart."""
    logger.error("%s", text)
    settings, agent = RejoinSettings.from_env(), AgentInfo.from_env()
    if agent is not None:
        Member(settings, RankInfo.from_env(), agent).refuse(settings.generation, text)


def _patch(owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, before))


def end_setup() -> None:
    """The program has built its objects: from here on groups are real ones. Before they get their connections."""
    while _undo:
        _undo.pop()()


def main() -> None:
    """``python -m mindx_elastic.rejoin.joiner SCRIPT ARGUMENTS``: run the program as a new process of a running job."""
    if not RejoinSettings.from_env().generation:
        sys.exit("this module is started by mindx-elastic run")
    prepare()
    run(sys.argv[1:])


if __name__ == "__main__":
    # The module under its own name, not a second one under this: `end_setup` is to undo what `prepare` has done.
    from mindx_elastic.rejoin import joiner  # noqa: PLW0406

    joiner.main()
