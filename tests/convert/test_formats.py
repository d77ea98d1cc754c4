from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mindx_elastic.convert.conversion import ConversionRequest, convert
from mindx_elastic.errors import UnsupportedStateError
from tests.convert.samples import assert_same_model, model_state, write_rank


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    write_rank(tmp_path / "ckpt", 0, 1, {"model": OrderedDict(model_state()), "progress": {"step": 17}})
    return tmp_path / "ckpt"


def test_the_model(ours: Path, tmp_path: Path) -> None:
    in_torch, plain = tmp_path / "m.pt", tmp_path / "m.safetensors"
    for made in (in_torch, plain):
        result = convert(ConversionRequest(source=ours, destination=made))
        assert (result.step, result.num_tensors) == (17, len(model_state()))
    assert_same_model(torch.load(in_torch, weights_only=True), model_state())
    assert_same_model(load_file(plain), model_state())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "m.pt", "m.safetensors"]


def test_a_module_s_state_keeps_its_version_numbers(tmp_path: Path) -> None:
    write_rank(tmp_path / "ckpt", 0, 1, {"model": torch.nn.BatchNorm1d(3).state_dict()})
    convert(ConversionRequest(source=tmp_path / "ckpt", destination=tmp_path / "m.pt"))
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert state._metadata[""]["version"] == 2
    torch.nn.BatchNorm1d(3).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "tensor"), [("x", torch.ones(2, dtype=torch.complex64)), ("__metadata__", torch.ones(1))]
)
def test_types_that_a_plain_file_cannot_hold(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    write_rank(tmp_path / "ckpt", 0, 1, {"model": {name: tensor}})
    with pytest.raises(UnsupportedStateError, match=rf"^{name}: a plain safetensors file cannot hold"):
        convert(ConversionRequest(source=tmp_path / "ckpt", destination=tmp_path / "x.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("value", [np.zeros(2), defaultdict(int)])
def test_a_value_that_torch_would_not_load_is_named(tmp_path: Path, value: object) -> None:
    write_rank(tmp_path / "ckpt", 0, 1, {"model": {"w": torch.ones(1), "_extra_state": [value]}})
    with pytest.raises(
        UnsupportedStateError, match=r"^model: torch.load\(weights_only=True\) reads no .*(numpy|collections)"
    ):
        convert(ConversionRequest(source=tmp_path / "ckpt", destination=tmp_path / "m.pt"))
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
