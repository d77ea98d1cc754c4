"""A static rendezvous whose restarts meet in a fresh store.

Workers that meet again in the agent's store find the addresses of their dead predecessors there, and gloo fails
("Connection refused"). For the dynamic backends torch has a switch against it
(``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``); the static one always hands out the agent's store. Here the first attempt uses
it, as under torchrun, so that MASTER_PORT is the port that the user gave; each later one a store of its own, which rank
0 hosts on a free port.
"""

from __future__ import annotations

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

__all__ = ["FreshStoreRendezvous"]


class FreshStoreRendezvous(RendezvousHandler):
    """Wraps the handler of the static backend."""

    def __init__(self, static: RendezvousHandler) -> None:
        self._static, self._rounds = static, 0

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._static.next_rendezvous()
        self._rounds += 1
        if self._rounds == 1:
            return info
        address = None if info.bootstrap_store_info is None else info.bootstrap_store_info.master_addr
        store = PrefixStore(f"mindx-elastic/{self._rounds}", info.store)
        master = RendezvousStoreInfo.build(info.rank, store, address)
        return RendezvousInfo(store, info.rank, info.world_size, master)

    @property
    def use_agent_store(self) -> bool:
        return self._rounds <= 1

    def get_backend(self) -> str:
        return self._static.get_backend()

    def is_closed(self) -> bool:
        return self._static.is_closed()

    def set_closed(self) -> None:
        self._static.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._static.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._static.get_run_id()

    def shutdown(self) -> bool:
        return self._static.shutdown()
