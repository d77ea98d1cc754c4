"""What holds for all tests."""

from __future__ import annotations

from tests.harness import unignore_signals


def pytest_configure() -> None:
    unignore_signals()
