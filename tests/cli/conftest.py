from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.cli.main import main
from tests.checkpoint_files import DAMAGES, write


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process."""

    def invoke(*words: object, columns: int | None = None) -> Outcome:
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.argv", ["mindx-elastic", *map(str, words)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        code = exit_info.value.code
        return Outcome(code if isinstance(code, int) else 0, *capsys.readouterr())

    return invoke


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two ranks; steps 10 (periodic) and 17 (breakpoint) are complete, of step 20 rank 1 is missing."""
    root = tmp_path / "ckpt"
    for rank in (0, 1):
        folder = root / f"rank_{rank}"
        write(folder / "resnet-1_10.safetensors", step=10, rank=rank, world_size=2)
        stopped = {"kind": "breakpoint", "reason": "SIGTERM"}
        write(folder / "resnet-2_7_breakpoint.safetensors", step=17, rank=rank, world_size=2, **stopped)
    write(root / "rank_0" / "resnet-2_10.safetensors", step=20, rank=0, world_size=2)
    (root / "events.jsonl").write_text("{}\n")
    return root


@pytest.fixture
def dead_pid() -> int:
    """Of a process that has ended; nobody gets its number so soon."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damage(request: pytest.FixtureRequest) -> Any:
    """Each way to spoil a file in turn."""
    return request.param
