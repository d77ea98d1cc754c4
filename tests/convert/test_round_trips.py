from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mindx_elastic.convert.conversion import ConversionRequest, Converted, convert
from mindx_elastic.errors import UsageError
from tests.convert.samples import assert_same_model, job_state, model_state, write_rank

NAMES = {"torch": "x.pt", "dcp": "folder", "mindspore": "x.safetensors"}


def run(source: Path, destination: Path, **options: Any) -> Converted:
    return convert(ConversionRequest(source=source, destination=destination, **options))


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    write_rank(tmp_path / "ckpt", 0, 1, job_state())
    return tmp_path / "ckpt"


@pytest.mark.parametrize("kind", ["torch", "mindspore"])
def test_the_model_from_ours_to_each_and_on(ours: Path, tmp_path: Path, kind: str) -> None:
    there, back = tmp_path / NAMES[kind], tmp_path / "back.pt"
    result = run(ours, there, destination_kind=kind)
    assert (result.source_kind, result.step) == ("mindx", 17)
    result = run(there, back, destination_kind="torch")
    assert (result.source_kind, result.step, result.num_tensors) == (kind, None, len(model_state()))
    assert_same_model(torch.load(back, weights_only=True), model_state())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["ckpt", there.name, "back.pt"])


@pytest.mark.filterwarnings("ignore")  # of torch, about one process
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_everything_from_ours(ours: Path, tmp_path: Path, kind: str) -> None:
    there, back = tmp_path / NAMES[kind], tmp_path / "back.pt"
    run(ours, there, destination_kind=kind, everything=True)
    if kind == "dcp":
        with pytest.raises(UsageError, match="format_utils dcp_to_torch"):
            run(there, back)
        dcp_to_torch_save(there, back)  # the command that it names
    state, expected = torch.load(back if kind == "dcp" else there, weights_only=True), job_state()
    assert set(state) == set(expected)
    assert_same_model(state["model"], expected["model"])
    assert list(map(int, state["optimizer"]["state"])) == [0, 10]
    (group,) = state["optimizer"]["param_groups"]
    assert group["lr"] == 0.1 and tuple(group["betas"]) == (0.9, 0.999) and group["params"] == [0, 10]
    assert state["progress"] == expected["progress"]
    assert [int(n) for n in state["rng"]["numpy"]] == [0, 1, 2, 3] and float(state["rng"]["x"]) == 1.5


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_dcp_reads_it(ours: Path, tmp_path: Path) -> None:
    run(ours, tmp_path / "folder")
    state = {name: torch.zeros_like(tensor) for name, tensor in model_state().items()}
    dcp.load(state, checkpoint_id=tmp_path / "folder")
    assert_same_model(state, model_state())


def test_from_mindspore_and_back(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {name: t.contiguous().clone() for name, t in model_state().items()}
    save_file(state, tmp_path / "ms.safetensors", metadata={"format": "ms"})
    run(tmp_path / "ms.safetensors", tmp_path / NAMES["torch"])
    run(tmp_path / NAMES["torch"], tmp_path / "again.safetensors", destination_kind="mindspore")
    assert_same_model(load_file(tmp_path / "again.safetensors"), state)
