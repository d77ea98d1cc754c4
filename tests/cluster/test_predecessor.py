"""The process that had a place before is ended, and no other one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mindx_elastic.alarm.peers import own_space
from mindx_elastic.cluster.messages import Identity
from mindx_elastic.cluster.predecessor import end_predecessor
from mindx_elastic.core.posix import start_ticks

ENV = {"MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "h", "MS_SCHED_PORT": "1", "MS_WORKER_NUM": "2", "MS_NODE_ID": "1"}


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    env = {**ENV, **getattr(request, "param", {})}
    found = subprocess.Popen(["sleep", "60"], env={**os.environ, **env})
    yield found
    found.kill()
    found.wait()


def identity(pid: int) -> Identity:
    return Identity(host="h", pid=pid, started=start_ticks(pid), space=own_space())


def test_a_stopped_predecessor_is_killed(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    told = identity(process.pid)
    assert end_predecessor(told, space=own_space(), node_id="1", env=ENV) == process.pid
    assert process.wait(60) == -signal.SIGKILL
    assert end_predecessor(told, space=own_space(), node_id="1", env=ENV) is None, "it is gone"


@pytest.mark.parametrize(
    "process",
    [{"MS_ROLE": "MS_SCHED"}, {"MS_SCHED_PORT": "2"}, {"MS_SCHED_HOST": "g"}, {"MS_NODE_ID": "0"}],
    indirect=True,
)
def test_what_is_no_worker_of_this_place_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    assert end_predecessor(identity(process.pid), space=own_space(), node_id="1", env=ENV) is None
    assert process.poll() is None


@pytest.mark.parametrize(
    "change", [{"started": "1"}, {"space": "elsewhere"}, {"space": ""}, {"pid": 1}, {"started": ""}]
)
def test_what_the_scheduler_says_is_not_believed(process: subprocess.Popen[bytes], change: dict[str, Any]) -> None:
    assert end_predecessor(replace(identity(process.pid), **change), space=own_space(), node_id="1", env=ENV) is None
    assert process.poll() is None
    for told in (None, identity(os.getpid())):
        assert end_predecessor(told, space=own_space(), node_id="1", env=ENV) is None
