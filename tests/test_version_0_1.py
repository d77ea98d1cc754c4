"""The files that version 0.1 wrote are used as 0.1 itself would use them; see ``tests/data/v0_1/README.md``."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import Dataset

import mindx_elastic as mx
from mindx_elastic.cli.main import main

FILES = Path(__file__).parent / "data" / "v0_1"
EXPECTED = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))
"""What 0.1 said of its own files: "one rank" after a resume, and "commands"."""


@pytest.fixture(autouse=True)
def a_machine_without_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINDX_FAULT_DIR", "MINDX_RESET_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))


def copy_case(case: str, target: Path) -> Path:
    """A copy that belongs to the user of the test and that only this user may write to."""
    for source in sorted((FILES / case).rglob("*")):
        if source.is_file():
            path = target / source.relative_to(FILES / case)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = source.read_bytes()
            if path.suffix == ".gz":
                path, content = path.with_suffix(""), gzip.decompress(content)
            path.write_bytes(content)
            path.chmod(0o644)
    return target


def ask(monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    monkeypatch.setattr("sys.argv", ["mindx-elastic", *map(str, words)])
    with redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as leaving:
        main()
    assert not leaving.value.code, output.getvalue()
    return output.getvalue()


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    def of(tensor: torch.Tensor) -> str:
        return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.numpy().tobytes()).hexdigest()

    return {name: of(tensor)[:16] for name, tensor in tensors.items()}


_OTHERWISE = {"exact", "bytes", "total_bytes"}
"""0.1 said that a resume is exact where nothing is known against it: now it is not proved yet. And a plan counted bytes
of tensors, where it now has the sizes of the files."""


def assert_has(said: Any, expected: Any) -> None:
    """All that 0.1 said is said."""
    if isinstance(expected, dict):
        for name in expected.keys() - _OTHERWISE:
            assert_has(said[name], expected[name])
    elif isinstance(expected, list):
        assert len(said) == len(expected)
        for mine, each in zip(said, expected, strict=True):
            assert_has(mine, each)
    else:
        assert said == expected


@pytest.mark.parametrize("case", EXPECTED["commands"])
def test_the_commands_say_what_0_1_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """``plan``, ``inspect``, ``verify``, ``status`` and ``convert``; what ``--emit-env`` writes; group info files."""
    folder, expected = copy_case(case, tmp_path / "case"), EXPECTED["commands"][case]
    ckpt, weights = folder / "ckpt", tmp_path / "weights.safetensors"
    plan, inspect, verify = (
        json.loads(ask(monkeypatch, name, ckpt, "--json")) for name in ("plan", "inspect", "verify")
    )
    assert_has(plan, expected["plan"])
    assert_has(inspect["steps"], expected["inspect"])
    assert inspect["quarantined"] == expected["quarantined"]
    assert {name: verify[name] for name in expected["verify"]} == expected["verify"]
    if "status" in expected:
        assert_has(json.loads(ask(monkeypatch, "status", folder / "run", "--json")), expected["status"])
    ask(monkeypatch, "convert", ckpt, weights)
    with safe_open(weights, "pt") as file:
        assert digests({name: file.get_tensor(name) for name in file.keys()}) == expected["convert"]  # noqa: SIM118
    groups = sorted(folder.glob("group/rank_*/group_info.pb"))
    assert [mx.restore_group_info_list(path) for path in groups] == expected["group info"]
    if (folder / "restore.env").exists():
        ask(monkeypatch, "plan", ckpt, "--emit-env", tmp_path / "exports.env")
        assert (tmp_path / "exports.env").read_text() == (folder / "restore.env").read_text()


class Samples(Dataset[tuple[torch.Tensor, int, int]]):
    """Eight vectors with noise drawn anew each time."""

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return self.x[index] + 0.1 * torch.rand(3) + random.random(), index % 2, index


class Counter:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"steps": 0, "mean": torch.zeros(2), "seen": np.zeros(2, dtype=np.int64)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize(("name", "norm"), [("plain", nn.BatchNorm1d), ("fsdp on 1 rank", nn.LayerNorm)])
def test_a_start_goes_on_as_0_1_would(tmp_path: Path, name: str, norm: type[nn.Module]) -> None:
    """The same position, tensors, random numbers and samples; from files of shards on two ranks, too."""
    directory, (expected,) = copy_case(name.partition(" ")[0], tmp_path / "case") / "ckpt", EXPECTED["one rank"][name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, bias=False), norm(5), nn.Dropout(0.2), nn.Linear(5, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = mx.Guard(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        loader=(loader := mx.data.ResumableLoader(Samples(), batch_size=2, shuffle=True, seed=3)),
        stateful={"counter": (counter := Counter())},
        directory=directory,
        prefix="net",
    )
    with guard:
        assert [guard.position.step, guard.position.epoch, guard.position.step_in_epoch] == expected["position"]
        assert [random.random(), float(np.random.rand()), float(torch.rand(1))] == expected["random"]
        assert digests(model.state_dict()) == expected["model"]
        states = optimizer.state_dict()["state"].items()
        kept = {f"{number}.{key}": value for number, entry in states for key, value in entry.items()}
        assert digests(kept) == expected["optimizer"]
        assert optimizer.param_groups[0]["lr"] == expected["lr"]
        steps, mean, seen = counter.state.values()
        assert [steps, mean.tolist(), seen.tolist()] == expected["counter"]
        epochs = ([batch[2].tolist() for batch in loader] for _ in guard.epochs(50))
        assert next(filter(None, epochs)) == expected["samples"], "an epoch that was over is passed over"
    assert guard.resumed_path is not None and guard.resumed_path.name == Path(expected["path"]).name
