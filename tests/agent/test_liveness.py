from __future__ import annotations

import os
import subprocess
import sys
import time

from mindx_elastic.agent.liveness import is_alive, start_ticks


def test_this_process() -> None:
    assert start_ticks(os.getpid()).isdecimal()
    assert is_alive(os.getpid(), None) and is_alive(os.getpid(), time.time())
    assert not is_alive(os.getpid(), time.time() - 86400 * 365)  # so that was another one


def test_no_process() -> None:
    assert not is_alive(0, None) and not is_alive(-1, None) and start_ticks(2**30) == ""


def test_one_of_which_only_the_exit_status_is_left() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read() == b""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid, None)
    process.communicate()


def test_a_process_with_an_odd_name() -> None:
    code = "import sys; open('/proc/self/comm', 'w').write(') Z 1 2'); print('named', flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"named\n"
    assert is_alive(process.pid, time.time())
    process.communicate()
