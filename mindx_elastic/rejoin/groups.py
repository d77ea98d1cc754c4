"""Gives the process groups new connections, inside the group objects that the program and torch hold.

Only this module and `nccl` use torch's internals: `problem` says at the start whether this torch has them all.
The connections of a group are its *backends*. A backend that is registered under a type is never replaced, so each
generation takes its own type numbers. The old backends stay: torch keeps 3 threads and 4 to 5 descriptors for each
one of gloo.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.rejoin import nccl
from mindx_elastic.start.ddp_warmup import replay_gradient_order

__all__ = [
    "DdpModules",
    "connect",
    "devices",
    "digest",
    "keep_timeout",
    "missing_calls",
    "my_groups",
    "problem",
    "rebuild_buckets",
    "reset_ddp",
    "why_held",
]

DdpModules: TypeAlias = "Sequence[tuple[str, DistributedDataParallel]]"
"""DDP modules and their places."""
_types = count(100)  # torch's own are below
_timeouts: dict[str, timedelta] = {}


class _Group(NamedTuple):
    """A process group that this rank is in."""

    handle: Any
    name: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    backends: tuple[tuple[str, str], ...]
    """Device types and the names of their backends."""


def missing_calls() -> list[str]:
    """What this torch lacks that a recovery in place needs, whatever the program does; empty: nothing."""
    from torch.distributed import distributed_c10d as c10d

    world: Any = getattr(c10d, "_world", None)
    needed = [
        (getattr(c10d, "ProcessGroup", None), "_register_backend"),
        (getattr(c10d, "ProcessGroup", None), "BackendType"),
        (world, "pg_map"),
        (world, "pg_names"),
        (world, "pg_group_ranks"),
        (world, "pg_backend_config"),
        (getattr(dist, "Reducer", None), "_reset_state"),
        (getattr(dist, "Reducer", None), "_rebuild_buckets"),
        (DistributedDataParallel, "_update_process_group"),
    ]
    return [name for owner, name in needed if owner is None or not hasattr(owner, name)]


def problem() -> str:
    """Why the groups of this process cannot get new connections; empty: they can."""
    if missing := missing_calls():
        return f"this torch ({torch.__version__}) lacks {', '.join(missing)}"
    if not dist.is_initialized():
        return "there is no process group"
    backends = {each for group in my_groups() for each in group.backends}
    others = sorted({kind for _, kind in backends} - {"gloo", nccl.BACKEND})
    if others:
        return f"process groups with the backend {', '.join(others)} cannot get new connections"
    of_nccl = [device for device, kind in backends if kind == nccl.BACKEND]
    if of_nccl and (said := nccl.problem(of_nccl)):
        return said
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the process groups"
    return ""


def my_groups() -> Iterator[_Group]:
    """The groups that this rank is in, in the order in which they were made."""
    from torch.distributed import distributed_c10d as c10d

    world: Any = c10d._world
    for handle, (kind, _) in list(world.pg_map.items()):
        config = str(world.pg_backend_config.get(handle, "") or kind)
        devices = c10d.BackendConfig(c10d.Backend(config)).get_device_backend_map()
        ranks = world.pg_group_ranks[handle]
        order = tuple(sorted(ranks, key=ranks.__getitem__))
        yield _Group(handle, str(world.pg_names[handle]), order, tuple(sorted(devices.items())))


def digest() -> str:
    """A digest of the groups with all ranks, which every rank has: the same text on ranks that have made the same."""
    world_size = dist.get_world_size()
    told = [[group.name, list(group.ranks)] for group in my_groups() if len(group.ranks) == world_size]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def connect(store: Any, rank: int, timeout_s: float) -> int:
    """Give every group of this rank new connections; returns how many groups. All ranks together, main thread.

    `store`: a store of this generation alone. Raises RuntimeError where a rank does not come in `timeout_s` seconds.
    """
    from torch._C._distributed_c10d import ProcessGroup

    if said := problem() or devices.wait_aborted():  # groups may have been made since the entry
        raise RuntimeError(said)
    number = 0
    for number, group in enumerate(my_groups(), 1):  # noqa: B007
        position, timeout = group.ranks.index(rank), _timeout_of(group)
        description = group.handle.group_desc
        for kind in sorted({kind for _, kind in group.backends}):
            if kind == nccl.BACKEND:
                prefix = dist.PrefixStore(f"nccl/{group.name}", store)
                old, is_world = _backend_of(group, "cuda"), group.name == "0"
                backend = nccl.new_backend(prefix, position, group.ranks, group.name, old, timeout, is_world=is_world)
            else:
                backend = _new_gloo(group, position, store, timeout_s, timeout)
            number_of_type = ProcessGroup.BackendType(next(_types))
            for device, its_kind in group.backends:
                if its_kind == kind:
                    group.handle._register_backend(torch.device(device), number_of_type, backend)
        # Torch keeps both in the backends. Functional collectives look a group up by its name.
        group.handle._set_group_name(group.name)
        group.handle._set_group_desc(description)
    devices.connected()
    return number


def _new_gloo(group: _Group, position: int, store: Any, timeout_s: float, timeout: timedelta | None) -> Any:
    from torch._C._distributed_c10d import ProcessGroupGloo

    prefix = dist.PrefixStore(f"gloo/{group.name}", store)
    backend = ProcessGroupGloo(prefix, position, len(group.ranks), timeout=timedelta(seconds=timeout_s))
    if hasattr(backend.options, "global_ranks_in_group"):  # torch 2.6 has neither field for gloo
        backend.options.global_ranks_in_group = [] if group.name == "0" else list(group.ranks)
        backend.options.group_name = group.name  # type: ignore[assignment]
    if timeout is not None:
        backend._set_default_timeout(timeout)
    return backend


def _backend_of(group: _Group, device: str) -> Any:
    """None: there is no such backend, as in a new process."""
    try:
        return group.handle._get_backend(torch.device(device))
    except RuntimeError:
        return None


def _nccl_backends() -> list[Any]:
    if not dist.is_initialized():
        return []
    found = [_backend_of(group, device) for group in my_groups() for device, kind in group.backends if kind == "nccl"]
    return [backend for backend in found if hasattr(backend, "abort")]


devices = nccl.Devices(_nccl_backends)
"""The communicators of the groups."""


def why_held(group: Any, modules: Sequence[Any]) -> str:
    """Who else than torch and `modules` (DDP) holds the default group, so that another one cannot take its place;
    empty: no rank."""
    from torch.distributed import distributed_c10d as c10d

    known = [vars(module) for module in modules] + [vars(c10d), vars(dist), vars(dist.group)]
    world: Any = c10d._world
    known += [value for name, value in vars(c10d).items() if name.startswith("_pg_") and isinstance(value, dict)]
    known += [value for value in vars(world).values() if isinstance(value, dict)]
    known += [world, vars(world), *modules, *getattr(world, "tags_to_pg", {}).values()]
    others = [each for each in gc.get_referrers(group) if not any(each is one for one in known) and not _is_frame(each)]
    return f"a {type(others[0]).__name__} holds the default group" if others else ""


def _is_frame(value: object) -> bool:
    return type(value).__name__ == "frame"


def keep_timeout(name: str, timeout: timedelta | None) -> None:
    """In a new process: of the group `name`, which has no connections yet."""
    from torch.distributed.distributed_c10d import default_pg_timeout

    _timeouts[name] = default_pg_timeout if timeout is None else timeout


def _timeout_of(group: _Group) -> timedelta | None:
    if group.name in _timeouts:
        return _timeouts.pop(group.name)
    found = getattr(getattr(_backend_of(group, group.backends[0][0]), "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def reset_ddp(modules: DdpModules) -> str:
    """Make a survivor's DDP modules, which were cut off in a backward, ready for the next one, as those of a new
    process are. Returns why they cannot."""
    for name, module in modules:
        if _rebuilds(module) and not module._has_rebuilt_buckets:
            return f"{name} has not laid out its buckets yet: that takes it two steps, outside of no_sync()"
        if module.gradient_as_bucket_view and (size := module.process_group.size()) & (size - 1):
            return f"{name} has gradient_as_bucket_view=True: its next step would round otherwise at {size} ranks"
    for _, module in modules:
        module.reducer._reset_state()
        # After a forward without gradients, as in an evaluation, DDP does not broadcast its buffers in the next one.
        module.require_forward_param_sync = True
    return ""


def _rebuilds(module: DistributedDataParallel) -> bool:
    """Whether it lays out its buckets again after its first backward."""
    return not module.find_unused_parameters or module.static_graph


def rebuild_buckets(name: str, module: DistributedDataParallel, order: list[int]) -> str:
    """In a new process whose groups have no connections yet: lay out the buckets as the other ranks have. Returns why
    it is not possible."""
    if not _rebuilds(module):
        return ""
    group, alone = module.process_group, _alone(frozenset(each.device.type for each in module.parameters()))
    # DDP's backward wants results, which a group without peers does not give.
    module._update_process_group(alone)
    try:
        said = replay_gradient_order(module, order)
        if said is not None:
            return f"{name}: {said}"
        module.reducer._rebuild_buckets()
    finally:
        module._update_process_group(group)
    module._has_rebuilt_buckets = module.require_forward_param_sync = True
    return ""


@functools.cache
def _alone(kinds: frozenset[str]) -> Any:
    """A process group of this process alone, for tensors on these types of devices. Kept, because the end of one takes
    gloo 10 ms."""
    from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo

    store = dist.HashStore()
    group = ProcessGroup(store, 0, 1)
    backend = ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=60))
    for kind in {"cpu", *kinds}:
        group._register_backend(torch.device(kind), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group
