"""The dynamic cluster: one program, started by hand for a scheduler and every worker.

::

    from mindx_elastic import cluster

    cluster.init()  # MS_ROLE=MS_SCHED serves here until the job is over
    rank, size = cluster.get_rank(), cluster.get_group_size()

See ``docs/porting.md``.
"""

from __future__ import annotations

from mindx_elastic.cluster.group import get_group_size, get_rank, init

__all__ = ["get_group_size", "get_rank", "init"]
