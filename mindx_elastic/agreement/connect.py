"""Builds the exchange that fits the job: none for one rank, the process group's store for several."""

from __future__ import annotations

import itertools
import os
from typing import Any

from mindx_elastic.agreement.exchange import Exchange, LocalExchange, StoreExchange
from mindx_elastic.agreement.other_launchers import refusal
from mindx_elastic.config import RankInfo
from mindx_elastic.errors import UsageError

__all__ = ["connect_store", "current_ranks", "open_exchange", "store_host"]

_guards = itertools.count()


def current_ranks(env: RankInfo) -> RankInfo:
    """Rank and world size as torch.distributed has them, else as the environment says.

    Raises UsageError for one of several ranks without torch.distributed, whoever has started it.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return RankInfo(
            rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=env.local_rank, attempt=env.attempt
        )
    if env.world_size > 1:
        raise UsageError(
            f"WORLD_SIZE={env.world_size} but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before entering the guard (Model.train does it by itself)"
        )
    refused = refusal(os.environ)
    if refused:
        raise UsageError(refused)
    return env


def open_exchange(ranks: RankInfo) -> Exchange:
    """An exchange under a key prefix of its own: one per attempt and per guard of the process.

    Every rank must open its guards in the same order, which `Model.train` and ordinary scripts do.
    """
    if ranks.world_size == 1:
        return LocalExchange()
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    number = next(_guards)
    # torch's env:// start lets rank 0 host it, unless the launcher does.
    host_rank = 0 if not _is_shared() and isinstance(_innermost(_get_default_store()), dist.TCPStore) else None
    return StoreExchange(
        lambda: connect_store(ranks, str(number)), rank=ranks.rank, world_size=ranks.world_size, host_rank=host_rank
    )


def connect_store(ranks: RankInfo, name: str) -> Any:
    """A connection of our own to the process group's store, for keys of this attempt under `name`.

    A wait holds a connection's lock, and torch uses its own. Raises UsageError where torch cannot open another one.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    # Only torchrun's shared store outlives an attempt; elsewhere it is new, and nodes may count attempts differently.
    prefix = f"mindx/{ranks.attempt if _is_shared() else 0}/{name}"
    base: Any = _get_default_store()  # torch's stubs lack multi_set on PrefixStore; `Store` says what is used
    return dist.PrefixStore(prefix, base.clone() if hasattr(base, "clone") else _second_connection(base))


def _is_shared() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_host() -> str:
    """The host of the process group's store, which every rank can reach; empty where there is no such host."""
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
    """What `Store.clone` does, for the torch versions that lack it."""
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
