"""How many restarts are left."""

from __future__ import annotations

from mindx_elastic.agent.restarts import Restarts


def test_so_many_in_all() -> None:
    restarts = Restarts(2)
    assert [restarts.take(now) for now in (0.0, 1e6, 2e6)] == [True, True, False]
    assert restarts.total == 2
    assert restarts.count == "2 of 2"
    assert "all 2 restarts are used up" in restarts.why_not


def test_so_many_within_the_window() -> None:
    restarts = Restarts(2, 10.0)
    assert [restarts.take(now) for now in (0.0, 5.0, 9.9, 10.0, 10.1, 15.1)] == [True, True, False, True, False, True]
    assert restarts.total == 4
    assert restarts.count == "2 of 2 within 10 s"
    assert "--max-restarts-window" in restarts.why_not


def test_none() -> None:
    restarts = Restarts(0)
    assert not restarts.take(0.0)
    assert restarts.why_not == "--max-restarts is 0"
