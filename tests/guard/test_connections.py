"""What a guard is connected to: here the parts of its first meeting, and what follows from the answers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from mindx_elastic.agreement.gather import Merged, meet
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.saver import Saver
from tests.harness import wait_until
from tests.start.shared_store import on_all_ranks


def test_a_rank_without_memory_does_not_hold_up_the_others_measurement(tmp_path: Path) -> None:
    """They agree on an interval later, and would wait for this rank's proposal."""

    def open_without_memory(rank: int, exchange: Any) -> list[str]:
        saver = Saver(
            Collector({"model": nn.Linear(1, 1)}),
            RankInfo(rank=rank, world_size=2),
            EventLog(tmp_path / f"{rank}.jsonl"),
        )
        with ExitStack() as stack:
            around = Connections(stack, [tmp_path], saver, "auto", None, exchange, evaluates=True)
            assert around.memory is None
            meet(exchange, "here", around.parts())
            around.connect()
            exchange.gather("told", None, Merged)
            wait_until(lambda: exchange.try_collect("snapshot_every") is not None, "both have told")
            found: list[str] = exchange.try_collect("snapshot_every")
            return found

    assert on_all_ranks(2, open_without_memory) == [["0", "0"]] * 2
