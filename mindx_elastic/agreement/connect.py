"""Opens the exchange that fits the job: a local one for one rank, the process group's store for several."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.job_key import find_key
from mindx_elastic.agreement.sealed import Seal
from mindx_elastic.agreement.store_exchange import StoreExchange
from mindx_elastic.config import KeySettings, RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.errors import UsageError

__all__ = ["connect_store", "current_seal", "open_ahead", "open_connection", "open_exchange", "store_host"]

_MISSING_S = 1.0  # how long a call may wait for keys that should be set already
_guards = itertools.count()
_seals: list[Seal] = []
_ready: list[Any] = []
"""Open connections to the process group's store that nothing uses, without prefixes."""


def open_exchange(ranks: RankInfo, name: str = "", *, again: bool = False) -> Exchange:
    """Open an exchange under its own key prefix: one per attempt and per guard of the process.

    Every rank must open its guards in the same order, as `Model.train` and ordinary scripts do. `name`: instead of the
    number of the guard, where processes of different ages meet. `again`: a guard is entered again, so this package's
    own agent hosts the store, for this job alone: connections that are open already will do. Raises UsageError for a
    job key that cannot be used.
    """
    if ranks.world_size == 1:
        return Exchange()
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    prefix = _prefix(ranks, name or str(next(_guards)))
    base: Any = _get_default_store()
    # torch's env:// start lets rank 0 host it, unless the launcher does.
    host_rank = 0 if not _is_shared() and isinstance(_innermost(base), dist.TCPStore) else None
    seal = _open_seal(prefix, ranks)
    return StoreExchange(
        # torch waits half an hour for a missing key by default; our own waits pass their timeout.
        lambda: _connect(prefix, timedelta(seconds=_MISSING_S), any_prefix=again),
        rank=ranks.rank,
        world_size=ranks.world_size,
        host_rank=host_rank,
        seal=seal,
        give_back=_give_back,
    )


def connect_store(ranks: RankInfo, name: str) -> Any:
    """Open a second connection to the process group's store, for keys of this attempt under `name`.

    A wait holds the lock of its connection, and torch needs its own. Raises UsageError where torch cannot open another
    connection.
    """
    return _connect(_prefix(ranks, name), None, any_prefix=False)


def open_ahead(count: int) -> None:
    """In a process that has no process group yet, and will get one at the launcher's store: open connections that it
    will need. A new connection may take the store seconds, when it looks up the name of the other end."""
    import torch.distributed as dist

    if _is_shared():
        with suppress(RuntimeError, ValueError, KeyError):  # then they are opened when they are needed
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            for _ in range(count):
                _ready.append(dist.TCPStore(*place, is_master=False, wait_for_workers=False))


def _give_back(stores: Sequence[Any]) -> None:
    """Connections of an exchange that is closed: for the next one."""
    _ready.extend(_innermost(store) for store in stores)


def _take_ready(base: Any) -> Any:
    """One of `_ready` that leads where `base` does; None: there is none."""
    import torch.distributed as dist

    base, timeout = _innermost(base), base.timeout
    for number, store in enumerate(_ready):
        if isinstance(base, dist.TCPStore) and (store.host, store.port) == (base.host, base.port):
            del _ready[number]
            store.set_timeout(timeout)
            return store
    return None


def _connect(prefix: str, timeout: timedelta | None, *, any_prefix: bool) -> Any:
    """`any_prefix`: the keys need not be under those of the process group."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    base: Any = _get_default_store()
    if any_prefix:
        own = open_connection()
    else:
        own = base.clone() if hasattr(base, "clone") else _second_connection(base)
    if timeout is not None:
        own.set_timeout(timeout)
    return dist.PrefixStore(prefix, own)  # torch's stubs lack multi_set on it; `Store` says what is used


def open_connection() -> Any:
    """A connection to the process group's store, for this caller alone and without a prefix. Raises as
    `connect_store`."""
    from torch.distributed.distributed_c10d import _get_default_store

    base: Any = _get_default_store()
    return _take_ready(base) or _second_connection(base)


def _prefix(ranks: RankInfo, name: str) -> str:
    # Only torchrun's shared store outlives an attempt; elsewhere it is new, and nodes may count attempts differently.
    return f"mindx/{ranks.attempt if _is_shared() else 0}/{name}"


def _is_shared() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_seal(prefix: str, ranks: RankInfo) -> Seal:
    key = find_key(KeySettings.from_env(), ranks.world_size)
    if key is None and ranks.rank == 0:
        logger.info(
            "the messages between the ranks are not sealed: any process that reaches the store's port can stop the "
            "job. Set MINDX_JOB_KEY_FILE, or block access to the port"
        )
    seal = Seal(key, prefix, ranks.rank)
    _seals[:] = [seal]
    return seal


def current_seal() -> Seal:
    """The seal of the exchange that was opened last in this process; if there is none, a seal without a key."""
    return _seals[-1] if _seals else Seal(None, "", 0)


def store_host() -> str:
    """The host of the process group's store, which every rank can reach; empty for a store without a host."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = _innermost(_get_default_store()) if dist.is_available() and dist.is_initialized() else None
    return str(store.host) if isinstance(store, dist.TCPStore) else ""


def _innermost(store: Any) -> Any:
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _second_connection(store: Any) -> Any:
    """As `Store.clone`, for torch versions without it."""
    import torch.distributed as dist

    store = _innermost(store)
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    if isinstance(store, dist.FileStore):
        return dist.FileStore(store.path)  # type: ignore[attr-defined]  # missing in the stubs
    raise UsageError(
        f"the process group uses a {type(store).__name__}, to which this torch cannot open a second connection; "
        "use torchrun or a TCPStore, or torch >= 2.9"
    )
