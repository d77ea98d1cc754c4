"""``mindx-elastic run`` whose agent breaks by itself: ``broken_agent.py WHERE [run's arguments...]``.

WHERE: ``before`` its workers are started, while they are ``starting``, or while they ``run``, as soon as a file
``break`` is in the working directory.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from mindx_elastic.agent.supervisor import Supervisor
from mindx_elastic.agent.workers import Workers
from mindx_elastic.cli.main import main


def fail(*args: Any, **more: Any) -> Any:
    raise RuntimeError("broken by the test")


def fail_later(workers: Workers, timeout_s: float, *more: Any) -> Any:
    if os.path.exists("break"):
        fail()
    return wait(workers, min(timeout_s, 0.05), *more)


wait = Workers.wait
where = sys.argv.pop(1)
if where == "before":
    Supervisor._hold_start = fail  # type: ignore[method-assign]
elif where == "starting":
    LocalElasticAgent._start_workers = fail  # type: ignore[method-assign]
else:
    Workers.wait = fail_later  # type: ignore[method-assign, assignment]
sys.argv.insert(1, "run")
main()
