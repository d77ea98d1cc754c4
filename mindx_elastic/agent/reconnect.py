"""Opens a rendezvous' connection to its store again after it broke.

torch's client of a TCP store never connects again: one reset of the connection, and every later call fails, the
heartbeats included, so that the other nodes take this one for lost and its agent cannot meet them at the next restart.
The store itself lives on, on its host. A client of the same host and port is put in the place of the broken one; the
broken one is kept, because where it also hosts the store, that would end with it.

Rejected: a new handler (it would be another node for the rendezvous, and the old one would have to be missed first).
Uses torch's private attributes; where they are not as in the versions known here, nothing is done, and the failure is
handled as if nothing could be.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler

from mindx_elastic.core.events import logger

__all__ = ["CONNECTION_ERRORS", "reconnect"]

CONNECTION_ERRORS = (RendezvousConnectionError, DistNetworkError)
_CONNECT_S = 5.0
_READ_TIMEOUT = timedelta(seconds=60)  # torch's own, where it does not say what it was
_broken: list[Store] = []
_lock = threading.Lock()


def reconnect(handler: RendezvousHandler) -> bool:
    """Give `handler` a new connection if its own is broken. False: the store's host is gone, or nothing is known of
    this kind of handler.

    Any thread; blocks for some seconds. Never raises.
    """
    # The membership thread may be at it when the main thread wants to meet the others.
    if not _lock.acquire(timeout=2 * _CONNECT_S):
        return False
    try:
        return _reconnect(handler)
    finally:
        _lock.release()


def _reconnect(handler: RendezvousHandler) -> bool:
    inner: Any = getattr(handler, "_static", handler)
    old: Any = getattr(inner, "_store", None)
    while isinstance(old, PrefixStore):
        old = old.underlying_store
    if not isinstance(old, TCPStore):
        return False
    if _answers(old):
        return True
    try:
        # torch's client would try for the whole time and print a page about each try.
        socket.create_connection((old.host, old.port), _CONNECT_S).close()
        new = TCPStore(
            old.host,
            old.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_S),
        )
        new.set_timeout(getattr(old, "timeout", _READ_TIMEOUT))
        if not _answers(new):
            return False
    except Exception as error:
        logger.debug("%s:%d cannot be reached: %s", old.host, old.port, error)
        return False
    backend = getattr(getattr(inner, "_state_holder", None), "_backend", None)
    if backend is not None and getattr(backend, "_store", None) is old:
        backend._store = new
    inner._store = new
    _broken.append(old)
    logger.warning("the connection to the rendezvous' store at %s:%d was broken; it is open again", old.host, old.port)
    return True


def _answers(store: Store) -> bool:
    with suppress(Exception):
        store.check(["mindx/answers"])
        return True
    return False
