"""A flipped bit, the notes of a fault, and what a run leaves behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from mindx_elastic.drill.inject import NOTES
from mindx_elastic.drill.outside import DrillLeftovers, flip_bit, note_fired, read_notes
from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.memory.folders import MAKER_FILE
from mindx_elastic.persist.reader import read_checkpoint
from tests.checkpoint_files import write_step
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


def test_notes_that_were_cut_off(tmp_path: Path) -> None:
    assert read_notes(tmp_path) == []
    note_fired(tmp_path, call="x")
    with open(tmp_path / NOTES, "a") as file:
        file.write('{"what": "hi')
    (note,) = read_notes(tmp_path)
    assert (note["what"], note["call"]) == ("hit", "x")


def test_one_bit_of_the_newest_checkpoint_of_the_rank(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(600.0), "b": torch.arange(3)}}
    write_step(tmp_path, 3, state=state)
    write_step(tmp_path, 7, state=state)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    said = flip_bit(tmp_path, 1, seed=5)
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert changed == {tmp_path / "rank_1" / "resnet-1_7.safetensors"}
    (path,) = changed
    pairs = zip(before[path], path.read_bytes(), strict=True)
    assert sum(bin(one ^ other).count("1") for one, other in pairs) == 1
    assert "resnet-1_7.safetensors, step 7" in said and "model." in said
    with pytest.raises(CorruptCheckpointError):
        read_checkpoint(path)


def test_no_checkpoint_to_damage(tmp_path: Path) -> None:
    assert flip_bit(tmp_path, 0, seed=1) == ""
    write_step(tmp_path, 3, world_size=1)
    assert flip_bit(tmp_path, 1, seed=1) == "", "another rank's"
