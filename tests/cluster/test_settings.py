"""The variables of a dynamic cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.cluster.settings import ClusterSettings
from mindx_elastic.errors import UsageError

WORKER = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "h", "MS_SCHED_PORT": "8118"}
SCHEDULER = {**WORKER, "MS_ROLE": "MS_SCHED"}


def test_everything_is_read() -> None:
    more = {"MS_NODE_ID": "w-1", "MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": "r", "MS_NODE_TIMEOUT": "30"}
    more |= {"MS_TOPO_TIMEOUT": "60", "DEVICE_ID": "3"}
    found = ClusterSettings.from_env({**WORKER, **more})
    assert found is not None
    assert (found.node_id, found.recovery, found.recovery_path, found.device) == ("w-1", True, Path("r"), 3)
    assert (found.limits.heartbeat_s, found.limits.formation_s) == (30, 60)
    ours = ClusterSettings.from_env({**WORKER, **more, "MINDX_HEARTBEAT_S": "2"})
    assert ours is not None and ours.limits.heartbeat_s == 2


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"MS_WORKER_NUM": "2"}, ["MS_ROLE is not set", "MS_SCHED_HOST is not set", "MS_SCHED_PORT is not set"]),
        (
            {**WORKER, "MS_ROLE": "MS_PSERVER"},
            ["MS_ROLE='MS_PSERVER': give", "parameter servers are not"],
        ),
        ({**WORKER, "MS_ROLE": "worker"}, ["MS_ROLE='worker': give MS_SCHED"]),
        ({**WORKER, "MS_WORKER_NUM": "0", "MS_SCHED_PORT": "70000"}, ["MS_WORKER_NUM='0'", "MS_SCHED_PORT='70000'"]),
        ({**WORKER, "MS_WORKER_NUM": "two"}, ["MS_WORKER_NUM='two'"]),
        ({**WORKER, "MS_WORKER_NUM": "1_0", "MS_SCHED_PORT": "+80"}, ["MS_WORKER_NUM='1_0'", "MS_SCHED_PORT='+80'"]),
        ({**WORKER, "MS_SCHED_HOST": "a b"}, ["MS_SCHED_HOST='a b'"]),
        ({**WORKER, "MS_NODE_ID": "../x"}, ["MS_NODE_ID='../x'"]),
        ({**WORKER, "MS_NODE_ID": "sched"}, ["MS_NODE_ID=sched is the scheduler's"]),
        ({**WORKER, "MS_ENABLE_RECOVERY": "yes"}, ["MS_ENABLE_RECOVERY='yes': give 1, 0 or nothing"]),
        ({**WORKER, "MINDX_HEARTBEAT_S": "0"}, ["MINDX_HEARTBEAT_S='0': give seconds"]),
        ({**WORKER, "MS_TOPO_TIMEOUT": "nan"}, ["MS_TOPO_TIMEOUT='nan'"]),
        ({**WORKER, "DEVICE_ID": "-1"}, ["DEVICE_ID='-1'"]),
        ({**SCHEDULER, "MS_ENABLE_RECOVERY": "1"}, ["MS_RECOVERY_PATH is not set"]),
        ({**WORKER, "MS_NODE_ID": "\x1b[31m"}, [r"MS_NODE_ID='\x1b[31m'".replace("\\", "\\\\")]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_all_that_is_wrong_is_named_at_once(wrong: dict[str, str], named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        ClusterSettings.from_env(wrong)
    for text in named:
        assert text in str(caught.value)
