"""``--metrics-port``: what Prometheus reads, and the dashboard that asks for it."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.history import AttemptRecord
from mindx_elastic.agent.metrics import METRICS, Metrics, MetricsServer
from mindx_elastic.core.pace import SlowRank
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.errors import UsageError

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "mindx-elastic.json"
SECOND = 10**9


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    pytest.importorskip("prometheus_client")
    made = MetricsServer("127.0.0.1", 0)
    yield made
    made.close()


def read(server: MetricsServer) -> dict[str, float]:
    """Values by name and labels, as a scraper sees them."""
    url = f"http://127.0.0.1:{server._server.server_port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


def page(**more: Any) -> Status:
    now = time.monotonic_ns()
    content = {"pid": 7, "phase": WorkerPhase.TRAINING, "entered_ns": now - 20 * SECOND, **more}
    return Status(**content)


def test_what_the_pages_say(server: MetricsServer) -> None:
    now = time.monotonic_ns()
    record = AttemptRecord(attempt=0, outcome="failed", steps_lost=3, detect_s=1.5, in_place=2)
    first = page(step=10, boundaries=10, boundary_ns=now - 10 * SECOND)
    server.metrics.look({0: first, 1: page(step=9, boundaries=9, boundary_ns=now)}, [record])
    later = first._replace(step=14, boundaries=14, boundary_ns=now - 2 * SECOND, stall_ns=SECOND // 2)
    later = later._replace(durable_step=12, durable_ns=now - 5 * SECOND, durable_bytes=4096, alarm_ns=now)
    waits = later._replace(waits_ns=(SECOND // 4,) * 64, steps_ns=(SECOND,) * 64)
    server.metrics.look({0: waits}, [record], [SlowRank(0, 125_000, 1_000_000), SlowRank(7, 1, 1)])
    found = read(server)
    assert (found['mindx_wait_seconds{rank="0"}'], found['mindx_slow_seconds{rank="0"}']) == (0.25, 0.125)
    assert not {'mindx_wait_seconds{rank="1"}', 'mindx_slow_seconds{rank="7"}'} & found.keys(), "not known; not here"
    assert found['mindx_step{rank="0"}'] == 14 and found['mindx_step{rank="1"}'] == 9
    assert found['mindx_steps_total{rank="0"}'] == 14
    assert found['mindx_durable_step{rank="0"}'] == 12 and found['mindx_durable_step{rank="1"}'] == -1
    assert 5 <= found['mindx_since_durable_seconds{rank="0"}'] < 20 <= found['mindx_since_durable_seconds{rank="1"}']
    assert found['mindx_durable_bytes_total{rank="0"}'] == 4096
    assert found['mindx_stall_seconds_total{rank="0"}'] == 0.5
    assert (found["mindx_workers"], found["mindx_attempts_total"], found["mindx_failures_total"]) == (1, 1, 3)
    assert (found["mindx_steps_lost_total"], found["mindx_recoveries_in_place_total"]) == (3, 2)
    assert found["mindx_not_training_seconds_total"] == 1.5


def test_the_step_on_disk_is_known_after_a_restart() -> None:
    """A process that has saved nothing yet: the step that it went on from is on disk, unless it came from memory."""
    pytest.importorskip("prometheus_client")
    metrics = Metrics(Path("/dev/shm"))

    def durable() -> float:
        (family,) = (each for each in metrics.collect() if each.name == "mindx_durable_step")
        return float(family.samples[0].value)

    begun = page(step=100, boundaries=100)
    for status, step in (
        (begun, -1),
        (begun._replace(durable_step=90), 90),
        (page(pid=8, resumed_step=100, resumed_path="/dev/shm/a/slot_0.safetensors"), -1),
        (page(pid=10, resumed_step=100, resumed_path="/disk/c-100.safetensors"), 100),
        (page(pid=11), -1),  # started over
    ):
        metrics.look({0: status}, [])
        assert durable() == step, status


def test_a_port_in_use_is_named() -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--metrics-port {port}: 127.0.0.1:{port} cannot be used .*in use"):
            MetricsServer("127.0.0.1", port)


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"pip install 'mindx_elastic\[metrics\]'"):
        MetricsServer("127.0.0.1", 0)


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    board = json.loads(text)
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"\bmindx_\w+", query)}
    assert named == set(METRICS), "each of them, and no other"
    assert set(re.findall(r"label_values\((\w+)", text)) <= set(METRICS)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
