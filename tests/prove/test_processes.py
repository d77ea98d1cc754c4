"""How runs are started, watched and ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mindx_elastic.prove.control import Control
from mindx_elastic.prove.processes import FreshProcess, Request, Zygote
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
    request = Request(command=[str(script)], env=environment(), log=tmp_path / "log", notes=None)
    process = zygote.start(request)
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
    request = Request(command=[str(script)], env=environment(), log=tmp_path / "log", notes=None)
    if how == "fresh":
        control = Control(folder=tmp_path, directories=tmp_path).write(tmp_path / "control.json")
        notes, env = tmp_path / "notes", environment(MINDX_PROVE=str(control))
        request = replace(request, notes=notes, env=env)
    process = zygote.start(request) if how == "forked" else FreshProcess(request)
    wait_until(process, lambda: request.log.exists() and "a line" in request.log.read_text())
    (tmp_path / "go").touch()
    assert wait_for(process) == 0
    assert request.log.read_text().splitlines()[-1] == "end"
