"""What holds for all tests."""

from __future__ import annotations

import pytest

from tests.harness import unignore_signals

_SLOW_S = 3600
"""For tests that wait for real processes: there `watchdog` finds a hang, and shows the job's output."""


def pytest_configure() -> None:
    unignore_signals()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        waits_for_jobs = any(item.get_closest_marker(name) for name in ("slow", "drill"))
        if waits_for_jobs and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SLOW_S))
