"""A new process before and after its guard: until then groups have no peers and collectives are refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.watchdog import finish

pytestmark = pytest.mark.slow

SCRIPT = """
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


def test_what_is_refused_before_the_guard_is_torchs_own_again_behind_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "MINDX_REJOIN": "1", "MINDX_RECOVER": "in-place", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = finish([sys.executable, str(script)], env=env, fresh=False)
    assert done.returncode == 0, done.stderr
    assert "REFUSED the program calls torch.distributed.all_reduce() before its guard" in done.stdout
    assert "PASSED all_reduce barrier" in done.stdout
