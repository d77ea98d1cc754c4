"""A rendezvous for a job of one node: it needs nobody, so it uses no connection that could break.

torch's own would host a TCP store on this machine and talk to it over the loopback device. A reset of that connection
(a firewall that is reloaded, a network namespace that is rebuilt, `ss -K`) cannot be undone, and the next restart would
find that "the nodes cannot meet".
"""

from __future__ import annotations

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

__all__ = ["OneNodeRendezvous"]


class OneNodeRendezvous(RendezvousHandler):
    """Each round is a store in this process's memory, and a free port for the store that rank 0 hosts."""

    def __init__(self, run_id: str, local_addr: str | None) -> None:
        """local_addr: what the workers connect to; None: this machine's name, as with torch's own."""
        self._run_id, self._local_addr = run_id, local_addr
        self._rounds, self._closed = 0, False
        self._store = HashStore()

    def next_rendezvous(self) -> RendezvousInfo:
        self._rounds += 1
        store = PrefixStore(f"{self._run_id}/{self._rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, self._local_addr))

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return "c10d"

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True
