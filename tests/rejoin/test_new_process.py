"""A process for a dead rank, as a joiner and as a spare, until it enters its guard; what is torch's own again then."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.watchdog import finish

pytestmark = pytest.mark.slow

JOINER = """
import torch, torch.distributed as dist
from mindx_elastic.rejoin import joiner

joiner.prepare()
dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=3)
dist.new_group([0, 1])
dist.barrier()
try:
    dist.all_reduce(torch.ones(1))
except joiner._SetupCollective as error:
    print("REFUSED", error)
joiner.end_setup()
dist.all_reduce(torch.ones(1))
print("PASSED", dist.all_reduce.__name__, dist.barrier.__name__)
"""
SPARE = """
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


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (JOINER, ["REFUSED the program calls torch.distributed.all_reduce() before", "PASSED all_reduce barrier"]),
        (SPARE, ["RANK 1 1 False", "OWN True True"]),
    ],
    ids=["joiner", "spare"],
)
def test_a_new_process_waits_and_refuses_and_gives_back(tmp_path: Path, script: str, said: list[str]) -> None:
    """A joiner's collectives are refused before its guard, and torch's own after it; a spare is told its rank where it
    asks for it."""
    (tmp_path / "script.py").write_text(script)
    env = {**os.environ, "MINDX_REJOIN": "1", "MINDX_RECOVER": "in-place", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = finish([sys.executable, str(tmp_path / "script.py"), str(tmp_path / "pipe")], env=env, fresh=False)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in said), done.stdout
