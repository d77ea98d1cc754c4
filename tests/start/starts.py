"""The start of a guard without the guard: no agent, no memory, no other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp import ddp_modules
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EventLog
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.platforms.at_start import PlatformAtStart
from mindx_elastic.start.start import Start, start_job

__all__ = ["start"]


def start(
    directory: Path,
    targets: Mapping[str, Any],
    *,
    collector: Collector | None = None,
    ranks: RankInfo | None = None,
    exchange: Exchange | None = None,
    risks: Unmanaged | None = None,
) -> Start:
    """What `Guard` does between opening its connections and training."""
    collector = collector or Collector(targets)
    ranks = ranks or RankInfo()
    events = EventLog(directory / "events.jsonl")
    saver = Saver(collector, ranks, events, resolved={directory: directory})
    with ExitStack() as stack:
        around = Connections(stack, [directory], saver, 0, None, exchange or Exchange(), evaluates=True)
        return start_job(
            [directory],
            collector=collector,
            targets=targets,
            job=saver,
            resume="auto",
            around=around,
            platform=PlatformAtStart(ranks, saver.flags),
            risks=risks or Unmanaged("error"),
            ddp=ddp_modules(targets),
            look_in=[directory],
        )
