"""What /proc says of a process."""

from __future__ import annotations

import os
import subprocess
import sys

from mindx_elastic.alarm.processes import ProcessStat, members_of, read_stat


def test_this_process() -> None:
    found = read_stat(os.getpid())
    assert found is not None and not found.is_ending
    assert (found.parent, found.group, found.session) == (os.getppid(), os.getpgrp(), os.getsid(0))
    assert found.started.isdecimal()


def test_no_process() -> None:
    assert read_stat(2**30) is None and read_stat(-1) is None


def test_one_of_which_only_the_exit_status_is_left() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    found = read_stat(process.pid)
    assert found is not None and found.state == "Z" and found.is_ending
    process.wait()


def test_a_thread_that_is_on_its_way_out() -> None:
    """Between the kernel's first step of an exit and its last: the state is still that of a running process."""
    fields = {"parent": 1, "group": 1, "session": 1, "processor_ticks": 0, "started": "1"}
    assert ProcessStat(state="R", flags=0x400004, **fields).is_ending  # type: ignore[arg-type]
    assert not ProcessStat(state="R", flags=0x400000, **fields).is_ending  # type: ignore[arg-type]


def test_a_process_with_an_odd_name() -> None:
    code = "import sys; open('/proc/self/comm', 'w').write(') Z 1 2'); print('named', flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"named\n"
    found = read_stat(process.pid)
    assert found is not None and found.parent == os.getpid() and not found.is_ending
    process.communicate()


def test_the_members_of_a_session() -> None:
    code = "import subprocess, sys; subprocess.Popen(['cat']); print('ready', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    members = members_of({process.pid})
    assert process.pid in members and len(members) == 2
    assert os.getpid() not in members
    process.communicate()
