"""``mindx-elastic run``, given run's arguments, whose agent breaks by itself once a file ``break`` is there."""

from __future__ import annotations

import os
import sys
from typing import Any

from mindx_elastic.agent.workers import Workers
from mindx_elastic.cli.main import main


def wait_or_break(workers: Workers, timeout_s: float, *more: Any) -> Any:
    if os.path.exists("break"):
        raise RuntimeError("broken by the test")
    return wait(workers, min(timeout_s, 0.05), *more)


wait = Workers.wait
Workers.wait = wait_or_break  # type: ignore[method-assign, assignment]
sys.argv.insert(1, "run")
main()
