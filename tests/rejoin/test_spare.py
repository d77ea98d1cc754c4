"""A process that waits to be told its rank, and what is torch's own again behind that."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.watchdog import finish

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, threading, time
import torch.distributed as dist
from mindx_elastic.rejoin import spare

signal.alarm(120)
pipe, plain, ask = sys.argv[1], type(os.environ).__getitem__, dist.get_world_size
os.mkfifo(pipe)
os.environ[spare.PIPE_VARIABLE] = pipe
spare.prepare()
assert dist.get_world_size is not ask and type(os.environ).__getitem__ is not plain

def tell():
    while not os.path.exists(pipe + spare.WAITS):
        time.sleep(0.01)
    with open(pipe, "w") as file:
        file.write(spare.promotion({"RANK": "1"}, "", ""))

threading.Thread(target=tell).start()
dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=3)
print("RANK", dist.get_rank(), os.environ["RANK"], spare.is_waiting())
print("OWN", dist.get_world_size is ask, type(os.environ).__getitem__ is plain)
"""


def test_a_spare_is_told_its_rank_where_it_asks_for_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "MINDX_REJOIN": "1", "MINDX_RECOVER": "in-place", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = finish([sys.executable, str(script), str(tmp_path / "pipe")], env=env, fresh=False)
    assert done.returncode == 0, done.stderr
    assert "RANK 1 1 False" in done.stdout and "OWN True True" in done.stdout, done.stdout
