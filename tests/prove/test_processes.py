"""How runs are started, watched and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.agent.zygote import Zygote
from mindx_elastic.prove.processes import Request, start_forked, start_fresh
from tests.prove.started import is_gone, of_a_run, wait_for, wait_until


@pytest.mark.drill
def test_a_process_is_ended_with_what_it_has_left_behind(tmp_path: Path, zygote: Zygote) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid) + '.')\n"
        "time.sleep(600)\n"
    )
    process = start_forked(zygote, Request(command=[str(script)], env=of_a_run(tmp_path), log=tmp_path / "log"))
    pid = tmp_path / "pid"
    wait_until(process, lambda: pid.exists() and pid.read_text().endswith("."))
    process.end()
    assert process.poll() == -9
    assert is_gone(int(pid.read_text()[:-1]))


@pytest.mark.parametrize("how", ["forked", "fresh"])
def test_a_line_is_seen_at_once(tmp_path: Path, zygote: Zygote, how: str) -> None:
    """A run that prints, and passes no step, does not hang."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, sys, time\n"
        "print('a line')\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        "print('end')\n"
    )
    request = Request(command=[str(script)], env=of_a_run(tmp_path), log=tmp_path / "log")
    process = start_forked(zygote, request) if how == "forked" else start_fresh(request)
    wait_until(process, lambda: request.log.exists() and "a line" in request.log.read_text())
    (tmp_path / "go").touch()
    assert wait_for(process) == 0
    assert request.log.read_text().splitlines()[-1] == "end"
