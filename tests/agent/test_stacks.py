"""Stacks on demand, asked for by the agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindx_elastic.agent.stacks import write_stacks
from mindx_elastic.agent.workers import Workers
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.guard.agent_link import STACK_SIGNAL

DUMP = "import faulthandler; faulthandler.register({}, file=open({!r}, 'a'), all_threads=True)\n"
WAIT = "def stuck_here():\n    print('up', flush=True)\n    sys.stdin.read()\nimport sys\nstuck_here()\n"


@pytest.mark.parametrize("phase", [WorkerPhase.TRAINING, WorkerPhase.LEFT])
@pytest.mark.parametrize("listens", [True, False])
def test_only_a_process_that_listens_is_asked(tmp_path: Path, phase: WorkerPhase, listens: bool) -> None:
    """To another one the signal would be the end: its file could not be opened, or its interpreter is ending."""
    file = tmp_path / "attempt_2_rank_0.txt"
    code = (DUMP.format(int(STACK_SIGNAL), str(file)) if listens else "") + WAIT
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    workers = Workers({0: process}, tmp_path)
    status = Status(pid=process.pid, phase=phase, step=7, entered_ns=1)
    assert write_stacks(workers, {0: status}, tmp_path, attempt=2) == [file]
    assert f"rank 0 pid {process.pid} step 7: state " in file.read_text()
    assert ("stuck_here" in file.read_text()) is listens
    process.communicate()
    assert process.returncode == 0
    workers.close()
