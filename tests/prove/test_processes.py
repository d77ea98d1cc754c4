"""How runs are started, watched and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.agent.zygote import Zygote
from mindx_elastic.prove.processes import start_forked
from tests.prove.started import environment, is_gone, wait_until


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
