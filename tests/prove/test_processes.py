"""How runs are started, watched and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.agent.zygote import Zygote
from mindx_elastic.prove.processes import start_forked, start_fresh
from tests.prove.started import environment, is_gone, wait_for, wait_until


@pytest.mark.drill
def test_a_process_is_ended_with_what_it_has_left_behind(tmp_path: Path, zygote: Zygote) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid) + '.')\n"
        "time.sleep(600)\n"
    )
    process = start_forked(zygote, [str(script)], environment(), tmp_path / "log")
    pid = tmp_path / "pid"
    wait_until(process, lambda: pid.exists() and pid.read_text().endswith("."))
    process.end(gently=False)
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
    what, log = ([str(script)], environment()), tmp_path / "log"
    process = start_forked(zygote, *what, log) if how == "forked" else start_fresh(*what, log)
    wait_until(process, lambda: log.exists() and "a line" in log.read_text())
    (tmp_path / "go").touch()
    assert wait_for(process) == 0
    assert log.read_text().splitlines()[-1] == "end"
