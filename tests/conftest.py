"""What holds for all tests."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import hypothesis
import pytest

from tests.harness import unignore_signals

_SLOW_S = 3600
"""For tests that wait for real processes: there `watchdog` finds a hang, and shows the job's output."""


if "CI" not in os.environ:  # there hypothesis itself does so, and repeats the same examples
    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")


def pytest_configure() -> None:
    unignore_signals()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        few = item.get_closest_marker("few")
        if few is not None and item.get_closest_marker("drill") is None:
            function = item.nodeid.partition("[")[0]
            seen[function] += 1
            if seen[function] > few.args[0]:
                item.add_marker(pytest.mark.drill)
    for item in items:
        waits_for_jobs = any(item.get_closest_marker(name) for name in ("slow", "drill"))
        if waits_for_jobs and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SLOW_S))


@pytest.fixture(autouse=True)
def _one_test_is_the_program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard looks at all modules of its program. The hundreds of other modules of tests that pytest has
    imported are none of it, and would take most of the time."""
    surroundings = sys.modules.get("mindx_elastic.guard.checks.program_variables")
    if surroundings is None:
        return
    every, own = surroundings._program_modules, getattr(request, "module", None)
    known: dict[tuple[object, ...], list[ModuleType]] = {}

    def of_this_test() -> list[ModuleType]:
        now = (id(sys.modules.get("__main__")), *sys.modules)
        if now not in known:
            known[now] = [m for m in every() if m is own or not m.__name__.startswith("tests.")]
        return known[now]

    monkeypatch.setattr(surroundings, "_program_modules", of_this_test)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For jobs in this very process: no settings of another one, and no traces afterwards."""
    from tests.guarded import no_traces, plain_environment

    plain_environment(monkeypatch)
    with no_traces():
        yield


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    """A process group of this process alone, without a network."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
