"""How a process leaves whose device may wait for a rank that is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindx_elastic.errors import GracefulExit
from mindx_elastic.guard.ending import Ending


class Left(Exception):
    """The process would have ended."""


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", ["peer", "signal"])
def test_a_process_whose_device_may_wait_for_a_dead_rank_ends_at_once(kind: str, on_device: bool) -> None:
    alarm = SimpleNamespace(kind=kind, deadline=SimpleNamespace(at=0.0))
    saved: list[str] = []

    def leave_behind(alarm: object, why: str) -> None:
        assert saved == ["callbacks"]
        raise Left(why)

    stopper = SimpleNamespace(
        alarm=alarm,
        after_save=lambda: saved.append("callbacks"),
        leave_behind=leave_behind,
        exit=lambda: GracefulExit(75, reason="rank 1 is gone", step=3, path=None),
    )
    listeners = SimpleNamespace(handlers=SimpleNamespace(linger=lambda at: None))
    saver: Any = SimpleNamespace(
        collector=SimpleNamespace(devices=SimpleNamespace(is_used=on_device)),
        events=SimpleNamespace(emit=lambda *args, **facts: None),
    )
    stages: Any = SimpleNamespace(stopper=stopper, listeners=listeners)
    around: Any = SimpleNamespace(leave=lambda stopper: None)
    ending = Ending(stages, around, saver, final=(), periodic=(), has_resumed=False)
    if kind == "peer" and on_device:
        with pytest.raises(Left, match="may wait for a rank that is gone"):
            ending.leave()
    else:
        assert ending.leave().code == 75
