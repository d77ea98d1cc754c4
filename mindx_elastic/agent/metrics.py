"""``--metrics-port``: what the agent knows of its workers, in Prometheus' text format.

The agent's main thread notes what it sees, twice a second; the server's threads read the newest note and never wait for
the job. Counters of a rank begin at 0 with each of its processes, as its status page does: ``rate`` allows for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mindx_elastic.agent.history import AttemptRecord, Totals, add_up
from mindx_elastic.core.events import logger
from mindx_elastic.core.pace import SlowRank, paces_of
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.errors import UsageError

__all__ = ["METRICS", "Metrics", "MetricsServer"]

METRICS = {
    "mindx_workers": "Workers of this node that have a guard and have not left it",
    "mindx_step": "Last step that the rank has passed",
    "mindx_steps_total": "Steps that the rank's process has passed",
    "mindx_durable_step": "Newest step that the rank's process knows to be on disk; -1: it knows of none yet",
    "mindx_since_durable_seconds": "Since the rank last brought a step to disk, or has begun",
    "mindx_durable_bytes_total": "Bytes of checkpoints that the rank's process has written",
    "mindx_stall_seconds_total": "How long periodic saves have held up the rank's training",
    "mindx_wait_seconds": "How long the rank waits for the others in a step, median of the last 64",
    "mindx_slow_seconds": "How long the others wait for the rank in nearly each of these steps; 0: it is not slow",
    "mindx_attempts_total": "Starts of the workers",
    "mindx_failures_total": "Failures, those recovered from in place included",
    "mindx_recoveries_in_place_total": "Failures that were recovered from in place",
    "mindx_steps_lost_total": "Steps that failures have cost, as far as that is known",
    "mindx_not_training_seconds_total": "How long failures have kept the job from training",
}
"""Names and what they mean. Those of a rank have the label `rank`."""
_NS = 1e9


class Metrics:
    """`look` belongs to the agent's main thread, `collect` to any other."""

    def __init__(self, memory: Path | None = None) -> None:
        """memory: where shared memory is mounted; a step that was read from there is not on disk."""
        self._memory = memory
        self._note: tuple[Mapping[int, Status], int, Totals] = ({}, 0, add_up(()))
        self._slow: Mapping[int, SlowRank] = {}

    def look(
        self,
        statuses: Mapping[int, Status],
        records: Iterable[AttemptRecord],
        slow: Iterable[SlowRank] = (),
    ) -> None:
        """What the workers' pages say now, and what the agent knows of its attempts. slow: ranks of the job."""
        self._slow = {each.rank: each for each in slow}
        num_workers = sum(0 < status.phase < WorkerPhase.LEFT for status in statuses.values())
        # One store: a reader sees the old or the new one. What a dead rank said last stays.
        self._note = {**self._note[0], **statuses}, num_workers, add_up(records)

    def collect(self) -> Iterator[Any]:
        """For prometheus_client's registry."""
        pages, num_workers, totals = self._note
        now, paces, slow = time.monotonic_ns(), paces_of(pages), self._slow
        of_rank: dict[str, Mapping[int, float]] = {
            "mindx_step": {r: page.step for r, page in pages.items()},
            "mindx_steps_total": {r: page.boundaries for r, page in pages.items()},
            "mindx_durable_step": {r: self._durable_step(page) for r, page in pages.items()},
            "mindx_since_durable_seconds": {
                r: (now - (page.durable_ns or page.entered_ns)) / _NS for r, page in pages.items() if page.entered_ns
            },
            "mindx_durable_bytes_total": {r: page.durable_bytes for r, page in pages.items()},
            "mindx_stall_seconds_total": {r: page.stall_ns / _NS for r, page in pages.items()},
            "mindx_wait_seconds": {pace.rank: pace.middle / 1e6 for pace in paces},
            "mindx_slow_seconds": {p.rank: slow[p.rank].lag / 1e6 if p.rank in slow else 0.0 for p in paces},
        }
        of_node = {
            "mindx_workers": num_workers,
            "mindx_attempts_total": totals.attempts,
            "mindx_failures_total": totals.failures,
            "mindx_recoveries_in_place_total": totals.in_place,
            "mindx_steps_lost_total": totals.steps_lost,
            "mindx_not_training_seconds_total": totals.not_training_s,
        }
        for name in METRICS:
            if name in of_node:
                yield _family(name, {(): of_node[name]}, ())
            else:
                yield _family(name, {(str(rank),): value for rank, value in of_rank[name].items()}, ("rank",))

    def _durable_step(self, page: Status) -> int:
        is_memory = self._memory is not None and Path(page.resumed_path).is_relative_to(self._memory)
        resumed = -1 if not page.resumed_path or is_memory else page.resumed_step
        return max(page.durable_step, resumed)


def _family(name: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name.removesuffix("_total"), METRICS[name], labels=labels)
    for label, value in values.items():
        family.add_metric(label, value)
    return family


class MetricsServer:
    """Serves `metrics` over HTTP until `close`, in its own threads."""

    def __init__(self, host: str, port: int, memory: Path | None = None) -> None:
        """memory: as for `Metrics`. Raises UsageError when prometheus_client is not installed, or the port cannot be
        used."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise UsageError(
                f"--metrics-port {port} needs prometheus_client: pip install 'mindx_elastic[metrics]'"
            ) from None
        self.metrics = Metrics(memory)
        registry: Any = CollectorRegistry(auto_describe=False)
        registry.register(self.metrics)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"--metrics-port {port}: {host}:{port} cannot be used ({why}); give another one"
            ) from error
        logger.info("metrics: http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
