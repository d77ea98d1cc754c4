"""``--metrics-port``: what the agent knows of its workers, in Prometheus' text format.

The agent's main thread notes what it sees, twice a second; the server's threads read the newest note and never wait for
the job. Counters go on over the processes of a rank: each starts again at 0 on its status page.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.agent.ledger import AttemptRecord, Totals, add_up
from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.errors import UsageError

__all__ = ["METRICS", "Metrics", "MetricsServer"]

METRICS = {
    "mindx_workers": "Workers of this node that have a guard and have not left it",
    "mindx_step": "Last step that the rank has passed",
    "mindx_steps_total": "Steps that the rank has passed since the agent's start, those done again included",
    "mindx_step_seconds": "Mean time of the rank's last steps",
    "mindx_durable_step": "Newest step of the rank that is known to be on disk; -1: none is",
    "mindx_since_durable_seconds": "Since the rank last brought a step to disk, or has begun",
    "mindx_durable_bytes_total": "Bytes of checkpoints that the rank has written",
    "mindx_stall_seconds_total": "How long periodic saves have held up the rank's training",
    "mindx_alarms_total": "Stops that the rank has heard of",
    "mindx_attempts_total": "Starts of the workers",
    "mindx_failures_total": "Failures, those recovered from in place included",
    "mindx_recoveries_in_place_total": "Failures that were recovered from in place",
    "mindx_steps_lost_total": "Steps that failures have cost, as far as that is known",
    "mindx_not_training_seconds_total": "How long failures have kept the job from training",
}
"""Names and what they mean. Those of a rank have the label `rank`."""
_NS = 1e9


@dataclass
class _Rank:
    """What is known of one rank, over all of its processes."""

    status: Status = field(default_factory=Status)
    steps: int = 0
    nbytes: int = 0
    stall_ns: int = 0
    alarms: int = 0
    step_s: float | None = None
    durable_step: int = -1

    def look(self, new: Status, memory: Path | None) -> None:
        """memory: the folder of what is only in memory."""
        old = self.status if self.status.pid == new.pid and new.boundaries >= self.status.boundaries else Status()
        passed = new.boundaries - old.boundaries
        self.steps += passed
        self.nbytes += new.durable_bytes - old.durable_bytes
        self.stall_ns += new.stall_ns - old.stall_ns
        self.alarms += bool(new.alarm_ns) and not old.alarm_ns
        since = old.boundary_ns or new.entered_ns
        if passed > 0 and since:
            self.step_s = max(0.0, (new.boundary_ns - since) / passed / _NS)
        if new.pid:
            self.durable_step = _durable_step(new, self.durable_step, memory)
        self.status = new


def _durable_step(new: Status, before: int, memory: Path | None) -> int:
    """`before`: that of the rank's earlier processes. What comes after the step that a process went on from does not
    count any more."""
    if new.durable_step >= 0:
        return new.durable_step
    if new.resumed_path and (memory is None or not Path(new.resumed_path).is_relative_to(memory)):
        return new.resumed_step
    return min(before, new.resumed_step) if new.entered_ns else before


class Metrics:
    """`look` belongs to the agent's main thread, `collect` to any other."""

    def __init__(self, memory: Path | None = None) -> None:
        """memory: where shared memory is mounted; a step that was read from there is not on disk."""
        self._memory = memory
        self._ranks: dict[int, _Rank] = {}
        self._note: tuple[Mapping[str, Mapping[int, float]], Mapping[int, int], int, Totals] = ({}, {}, 0, add_up(()))

    def look(self, statuses: Mapping[int, Status], records: Iterable[AttemptRecord]) -> None:
        """What the workers' pages say now, and what the agent knows of its attempts."""
        for rank, status in statuses.items():
            self._ranks.setdefault(rank, _Rank()).look(status, self._memory)
        known = {rank: each for rank, each in self._ranks.items() if each.status.pid}
        values: dict[str, Mapping[int, float]] = {
            "mindx_step": {r: each.status.step for r, each in known.items()},
            "mindx_steps_total": {r: each.steps for r, each in known.items()},
            "mindx_step_seconds": {r: each.step_s for r, each in known.items() if each.step_s is not None},
            "mindx_durable_step": {r: each.durable_step for r, each in known.items()},
            "mindx_durable_bytes_total": {r: each.nbytes for r, each in known.items()},
            "mindx_stall_seconds_total": {r: each.stall_ns / _NS for r, each in known.items()},
            "mindx_alarms_total": {r: each.alarms for r, each in known.items()},
        }
        since = {r: s.durable_ns or s.entered_ns for r, each in known.items() if (s := each.status).entered_ns}
        num_workers = sum(0 < status.phase < WorkerPhase.LEFT for status in statuses.values())
        self._note = values, since, num_workers, add_up(records)  # one store: a reader sees the old or the new one

    def collect(self) -> Iterator[Any]:
        """For prometheus_client's registry."""
        values, since, num_workers, totals = self._note
        now = time.monotonic_ns()
        values = {**values, "mindx_since_durable_seconds": {r: (now - ns) / _NS for r, ns in since.items()}}
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
                yield _family(name, {(str(rank),): value for rank, value in values.get(name, {}).items()}, ("rank",))


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
