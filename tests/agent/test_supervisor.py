"""What the agent believes of what lies in the rendezvous' store."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousError

from mindx_elastic.agent.ledger import print_block
from mindx_elastic.agent.rendezvous import agree_on_highest
from mindx_elastic.agent.supervisor import Supervisor


class Store:
    def __init__(self, **planted: str) -> None:
        self.values = {key.replace("_", "/"): value.encode("latin-1") for key, value in planted.items()}

    def set(self, key: str, value: str) -> None:
        self.values.setdefault(key, value.encode())

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]


def supervisor(num_nodes: int = 1) -> Any:
    made: Any = object.__new__(Supervisor)
    made._inbox = SimpleNamespace(interrupting=nullcontext)
    made._num_nodes, made._remaining_restarts = num_nodes, 1
    made._rdzv_handler, made._number = None, -1
    return made


def group(store: Store, node: int) -> Any:
    return SimpleNamespace(store=store, group_rank=node, group_world_size=2, spec=SimpleNamespace(max_restarts=3))


@pytest.mark.parametrize(("told", "wanted"), [("3", 3), ("0", 1), ("x", 1), ("9" * 30, 1)])
def test_the_highest_count_of_all_nodes_counts(told: str, wanted: int) -> None:
    store = Store(mindx_attempts_1=told)
    assert agree_on_highest(group(store, 0), "attempts", 1, 10**9 - 1) == wanted
    assert agree_on_highest(group(store, 1), "attempts", 1, 10**9 - 1) == wanted


@pytest.mark.parametrize("planted", ["", "4", "-1", "{}", "\xff\x1b[31m", "9" * 10_000, "3.0"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_planted_count_is_not_believed(planted: str, node: int) -> None:
    store = Store(mindx_restarts_1=planted) if node == 0 else Store(mindx_restarts=planted)
    assert agree_on_highest(group(store, node), "restarts", 2, 3) == 2


def test_nonsense_where_the_nodes_meet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda self, worker_group: json.loads("no json"))
    with pytest.raises(RendezvousError, match=r"makes no sense .JSONDecodeError"):
        supervisor(num_nodes=2)._rendezvous(SimpleNamespace(group_world_size=1))


def test_what_others_have_said_is_shown_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    print_block("first line\nsecond \x1b[2J\rline")
    assert capsys.readouterr().err == "first line\nsecond \\x1b[2J\\rline\n"
