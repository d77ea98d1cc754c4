"""SIGKILL at every point of a save: there is always a good file, and nothing is left over."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.reader import read_checkpoint, verify_file
from mindx_elastic.persist.storage import TEMP_SUFFIX, remove_stale_temps
from mindx_elastic.persist.writer import previous_path
from tests.persist.killed_saves import NAMES, POINTS
from tests.watchdog import finish


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    root = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("killed_saves.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = finish([sys.executable, script, root], env=environment)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout)


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_any_point_leaves_a_good_file(killed: tuple[Path, dict[str, int]], point: str) -> None:
    root, ends = killed
    folder = root / point
    assert ends[point] == (0 if point == "never" else signal.SIGKILL), "the kill must have happened"
    remove_stale_temps(folder)
    assert not [name for name in os.listdir(folder) if name.endswith(TEMP_SUFFIX)]
    for name in NAMES:
        path = folder / name
        assert verify_file(path) == []
        step = read_header(path).info.step
        assert read_checkpoint(path).state["big"][-1] == step
        if step == 2:
            assert verify_file(previous_path(path)) == []
            assert read_header(previous_path(path)).info.step == 1
    steps = [read_header(folder / name).info.step for name in NAMES]
    order = list(POINTS)
    assert steps[0] == (2 if order.index(point) >= order.index("renamed") else 1)
    assert steps[1] == (2 if order.index(point) >= order.index("other name published") else 1)
