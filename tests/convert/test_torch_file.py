from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.convert.conversion import ConversionRequest, convert
from mindx_elastic.convert.kinds import find_kind
from mindx_elastic.convert.torch_file import read_torch_file
from mindx_elastic.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ForeignCheckpointError,
    UsageError,
)
from tests.convert.samples import Marker, assert_same_model, model_state


@pytest.mark.parametrize("zipped", [True, False])
def test_old_and_new_form(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "anything"
    torch.save(model_state(), path, _use_new_zipfile_serialization=zipped)
    assert find_kind(path) == "torch"
    assert_same_model(read_torch_file(path), model_state())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_a_program_in_it_is_not_run(tmp_path: Path, zipped: bool, deep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark, path = tmp_path / "mark", tmp_path / "m.pt"
    value: Any = {"w": torch.ones(1), "x": [Marker(mark)]} if deep else Marker(mark)
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ForeignCheckpointError, match=r"posix.mkdir.*Nothing of it was run"):
        convert(ConversionRequest(source=path, destination=tmp_path / "folder"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.pt"]


@pytest.mark.parametrize("zipped", [True, False])
def test_cut_off_anywhere(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.arange(100.0)}, path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    for length in range(4, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=str(path)):
            read_torch_file(path)


def converted(tmp_path: Path, content: Any, **options: Any) -> dict[str, Any]:
    torch.save(content, tmp_path / "m.pt")
    made = tmp_path / "made.pt"
    convert(ConversionRequest(source=tmp_path / "m.pt", destination=made, everything=True, force=True, **options))
    state: dict[str, Any] = torch.load(made, weights_only=True)
    return state


def test_where_the_model_is(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    for name in ("model", "state_dict", "model_state_dict"):
        state = converted(tmp_path, {"epoch": 3, name: weights})
        assert list(state["model"]) == ["w"]
    state = converted(tmp_path, {"epoch": 3, "net": weights}, component="net")
    assert state["epoch"] == 3 and list(state["model"]) == ["w"]
    with pytest.raises(UsageError, match="net, teacher; say with --component"):
        converted(tmp_path, {"net": weights, "teacher": weights})
    with pytest.raises(UsageError, match="no component 'x'; there are net"):
        converted(tmp_path, {"net": weights}, component="x")
    with pytest.raises(UsageError, match="holds a list"):
        converted(tmp_path, [weights])
    with pytest.raises(UsageError, match="holds a Tensor"):
        converted(tmp_path, weights["w"])


def test_a_module_s_state_keeps_its_version_numbers(tmp_path: Path) -> None:
    state = converted(tmp_path, torch.nn.BatchNorm1d(3).state_dict())
    assert state["model"]._metadata[""]["version"] == 2
    again = torch.nn.BatchNorm1d(3)
    again.load_state_dict(state["model"])


def too_deep() -> Any:
    value: Any = torch.ones(1)
    for _ in range(500):
        value = (value,)
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("kind", ["torch", "mindspore", "dcp"])
@pytest.mark.parametrize(
    "content", [too_deep(), endless(), torch.ones(1).expand(1 << 40)], ids=["too deep", "endless", "repeated"]
)
def test_a_small_file_with_endless_content(tmp_path: Path, kind: str, content: Any) -> None:
    torch.save({"w": torch.ones(1), "x": content}, tmp_path / "m.pt")
    with pytest.raises(ForeignCheckpointError, match=r"m\.pt holds"):
        convert(ConversionRequest(source=tmp_path / "m.pt", destination=tmp_path / "x", destination_kind=kind))
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02junk",
        b"PK\x03\x04junk",
    ],
)
def test_no_checkpoint_at_all(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=str(path)):
        convert(ConversionRequest(source=path, destination=tmp_path / "x.pt"))
