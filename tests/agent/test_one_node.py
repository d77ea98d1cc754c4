"""The rendezvous of a job of one node."""

from __future__ import annotations

from mindx_elastic.agent.one_node import OneNodeRendezvous


def test_each_round_is_a_fresh_store_and_a_free_port() -> None:
    handler = OneNodeRendezvous("job", "127.0.0.1")
    rounds = [handler.next_rendezvous() for _ in range(2)]
    for info in rounds:
        assert (info.rank, info.world_size) == (0, 1)
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"
        assert 0 < info.bootstrap_store_info.master_port < 65536
    rounds[0].store.set("key", "old")
    assert not rounds[1].store.check(["key"])


def test_what_torch_asks_of_it() -> None:
    handler = OneNodeRendezvous("job", None)
    assert handler.get_run_id() == "job" and handler.get_backend() == "c10d"
    assert not handler.use_agent_store, "the workers' store outlives no attempt"
    assert handler.num_nodes_waiting() == 0 and not handler.is_closed()
    assert handler.shutdown() and handler.is_closed()
