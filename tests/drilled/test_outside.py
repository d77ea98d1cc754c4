"""What a run leaves behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mindx_elastic.drill.outside import DrillLeftovers
from mindx_elastic.memory.folders import MAKER_FILE
from tests.watchdog import finish

ORPHAN = """
import json, os, subprocess, sys
from mindx_elastic.drill.outside import DrillLeftovers, adopt_orphans
from mindx_elastic.core.posix import has_ended, start_ticks
assert adopt_orphans()
ours = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
run = "import subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True, stdout=s.DEVNULL).pid)"
first = subprocess.run([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True, check=True)
orphan = int(first.stdout)
started = start_ticks(orphan)
found = DrillLeftovers(known={ours.pid}, waits_s=0.2)
found.after_run(10**9)
os.waitpid(orphan, 0)
again = DrillLeftovers(known={ours.pid}, waits_s=0.2)
again.after_run(10**9)
hangs = DrillLeftovers(waits_s=0.2)
hangs.after_run(ours.pid)
print(json.dumps([orphan, found.processes, again.processes, hangs.processes, ours.poll()]))
ours.kill()
ours.wait()
"""


def test_a_process_that_outlives_its_run_is_named_and_ended() -> None:
    result = finish([sys.executable, "-c", ORPHAN], fresh=False)
    assert result.returncode == 0, result.stderr
    orphan, found, again, hangs, ours = json.loads(result.stdout)
    assert found == [f"process {orphan}: sleep 600 "]
    assert again == [] and ours is None
    assert hangs == [], "of a run that hangs nothing has been left behind yet"


def test_files_that_a_finished_job_must_not_leave(tmp_path: Path) -> None:
    directories, memory = tmp_path / "checkpoints", tmp_path / "memory"
    for path in (directories / "rank_0", memory / "agent-1-x"):
        path.mkdir(parents=True)
    (directories / "rank_0" / "a.safetensors").write_text("")
    (memory / MAKER_FILE).write_text("")
    assert DrillLeftovers().files(directories, memory, []) == []
    (directories / "rank_0" / ".a.012345.mindx-tmp").write_text("")
    (memory / "agent-1-x" / "slot_0").write_text("")
    assert DrillLeftovers().files(directories, memory, []) == [
        "rank_0/.a.012345.mindx-tmp",
        str(memory / "agent-1-x" / "slot_0"),
    ]
