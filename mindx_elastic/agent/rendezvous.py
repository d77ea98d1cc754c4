"""What torch's agent asks its rendezvous for. The nodes have met at a table of ours (`agent.nodes`), and a job of one
node uses no connection at all: a firewall that is reloaded, a network namespace that is rebuilt or ``ss -K`` would
break it.

Rejected: torch's own dynamic rendezvous over a store. Its client never connects again, a read from a host that is gone
blocks in C++, and the store ends with its host.
"""

from __future__ import annotations

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from mindx_elastic.cluster.messages import Group

__all__ = ["Rendezvous"]


class Rendezvous:
    """Says in which group the agent is. What `RendezvousHandler` has besides, nobody asks for."""

    def __init__(self, run_id: str, *, hosts: bool) -> None:
        """`hosts`: the agent hosts the workers' store, so that it outlives every worker."""
        self._run_id, self.use_agent_store = run_id, hosts
        self.group: Group | None = None
        """To be set before each round."""

    def next_rendezvous(self) -> RendezvousInfo:
        group = self.group
        assert group is not None
        return RendezvousInfo(HashStore(), group.node, group.nodes, RendezvousStoreInfo(group.host, group.port))

    def get_backend(self) -> str:
        return "c10d"

    def get_run_id(self) -> str:
        return self._run_id
