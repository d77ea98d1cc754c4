"""Folders whose files make up one model: by an index, by their numbers, by the shards' own metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindx_elastic.convert.conversion import ConversionRequest, Converted, convert
from mindx_elastic.errors import CorruptCheckpointError, UsageError

LAYERS = {f"layer.{number}": torch.arange(6.0).reshape(3, 2) + number for number in range(3)}
FILES = {name: f"model-0000{number}-of-00003.safetensors" for number, name in enumerate(LAYERS, 1)}


def write_index(path: Path, named: dict[str, str]) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 72}, "weight_map": named}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As Hugging Face's `save_pretrained` writes a large model."""
    made = tmp_path / "hf"
    made.mkdir()
    for name, file in FILES.items():
        save_file({name: LAYERS[name]}, made / file, metadata={"format": "pt"})
    write_index(made / "model.safetensors.index.json", FILES)
    return made


def converted(source: Path, **options: Any) -> tuple[dict[str, torch.Tensor], Converted]:
    made = source.parent / "w.pt"
    result = convert(ConversionRequest(source=source, destination=made, force=True, **options))
    return torch.load(made, weights_only=True), result


def assert_layers(found: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(LAYERS) and all(torch.equal(found[name], LAYERS[name]) for name in LAYERS)


def test_an_index_names_the_files(folder: Path) -> None:
    save_file({"lora.a": torch.ones(1)}, folder / "adapter_model.safetensors")
    save_file({"layer.0": LAYERS["layer.0"], "extra": torch.ones(1)}, folder / FILES["layer.0"])
    for source in (folder, folder / "model.safetensors.index.json"):
        found, result = converted(source)
        assert_layers(found)
        assert result.source_kind == "mindspore" and result.notes == [
            "not in model.safetensors.index.json, left out: adapter_model.safetensors",
            "tensors that model.safetensors.index.json does not name, left out: extra",
        ]


def test_links_into_a_cache(folder: Path) -> None:
    snapshot, one = folder.parent / "snapshot", folder.parent / "one"
    for made in (snapshot, one):
        made.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    (one / "model.safetensors").symlink_to(folder / FILES["layer.1"])
    assert_layers(converted(snapshot)[0])
    assert list(converted(one)[0]) == ["layer.1"]


def lose_a_file(folder: Path) -> str:
    (folder / FILES["layer.1"]).unlink()
    return "index.json names model-00002-of-00003.safetensors, which is not there: the weights are not complete"


def lose_a_tensor(folder: Path) -> str:
    save_file({"other": torch.ones(1)}, folder / FILES["layer.1"])
    return r"00002-of-00003.safetensors: has no tensor layer.1, which model.safetensors.index.json says"


def leave_the_folder(folder: Path) -> str:
    write_index(folder / "model.safetensors.index.json", FILES | {"x": "../x.safetensors"})
    return "outside of its folder"


def damage_the_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{")
    return "no index of tensors"


@pytest.mark.parametrize("damage", [lose_a_file, lose_a_tensor, leave_the_folder, damage_the_index])
def test_what_is_not_complete_is_refused(folder: Path, damage: Callable[[Path], str]) -> None:
    expected = damage(folder)
    with pytest.raises(CorruptCheckpointError, match=expected):
        converted(folder)
    assert not (folder.parent / "w.pt").exists()


def test_folders_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    for file in sorted(folder.glob("*-of-*")):  # the last one alone is still a part
        with pytest.raises(UsageError, match="has no index that says which files belong together"):
            converted(folder)
        file.unlink()
    save_file(LAYERS, folder / "model.safetensors")
    save_file({"lora.a": torch.ones(1)}, folder / "adapter_model.safetensors")
    found, result = converted(folder)
    assert_layers(found)
    assert result.notes == ["other files, left out: adapter_model.safetensors"]


def test_two_indexes(folder: Path) -> None:
    index = write_index(folder / "model.fp16.safetensors.index.json", {"layer.0": FILES["layer.0"]})
    with pytest.raises(UsageError, match=r"has 2 indexes: model.fp16.* give one"):
        converted(folder)
    assert list(converted(index)[0]) == ["layer.0"]


def test_an_index_of_torch_files(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    files = {name: file.replace("safetensors", "bin").replace("model", "pytorch_model") for name, file in FILES.items()}
    for name, file in files.items():
        torch.save({name: LAYERS[name]}, folder / file)
    torch.save({"lr": 0.1}, folder / "training_args.bin")
    write_index(folder / "pytorch_model.bin.index.json", files)
    found, result = converted(folder)
    assert_layers(found)
    assert result.source_kind == "torch"
    assert result.notes == ["not in pytorch_model.bin.index.json, left out: training_args.bin"]


# --- shards of torch's Hugging Face writer ---

WHOLE = {"w": torch.arange(35.0).reshape(7, 5), "b": torch.arange(7.0)}


def write_shards(folder: Path, ranks: int) -> list[Path]:
    """As ``HuggingFaceStorageWriter(save_distributed=True)`` writes rows of 3 on each rank, and "b" on the first."""
    folder.mkdir()
    paths = []
    for rank in range(ranks):
        path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        tensors = {"w": WHOLE["w"][rank * 3 : rank * 3 + 3].clone()} | ({"b": WHOLE["b"]} if rank == 0 else {})
        offsets = {name: {"saved_offsets": [rank * 3] + [0] * (value.ndim - 1)} for name, value in tensors.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(tensors, path, metadata=metadata)
        paths.append(path)
    return paths


def test_one_ranks_parts_are_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "sharded", 3)
    for source in (tmp_path / "sharded", paths[0], paths[1].rename(tmp_path / "alone.safetensors")):
        with pytest.raises(UsageError, match=r"one rank's parts of the tensors .*enable_consolidation=True"):
            converted(source)


def test_weights_of_one_of_several_model_ranks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"w": torch.ones(2)}}, path)
    assert list(converted(path)[0]) == ["w"]
    torch.save({"module": {"w": torch.zeros(2)}}, tmp_path / "mp_rank_01_model_states.pt")
    with pytest.raises(UsageError, match="whose ranks hold parts"):
        converted(path)


def test_a_file_that_only_sounds_like_deepspeeds(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "best_model_states.pt")
    assert list(converted(tmp_path / "best_model_states.pt")[0]) == ["w"]


@pytest.mark.parametrize("file", ["zero_to_fp32.py", "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_what_deepspeed_wrote_has_its_own_script(tmp_path: Path, file: str) -> None:
    path = tmp_path / "ds" / file
    path.parent.mkdir(parents=True)
    torch.save({"optimizer_state_dict": {}}, path)
    source = path if "optim" in file else path.parent
    with pytest.raises(UsageError, match=r"python zero_to_fp32\.py FOLDER OUT"):
        converted(source)
