"""The header: its round trip, and every way in which it can be wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mindx_elastic.errors import (
    CorruptCheckpointError,
    ForeignCheckpointError,
    UnsupportedStateError,
)
from mindx_elastic.persist.entries import place_tensors
from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.format import DATA_ALIGNMENT, NO_DIGEST, CheckpointInfo, HeaderDraft, read_header
from mindx_elastic.persist.reader import read_checkpoint
from mindx_elastic.persist.writer import write_checkpoint
from tests.checkpoint_files import info_of
from tests.persist.states import DTYPES, bits, tensor_of

INFO = info_of(
    run_id="run-ä", world_size=4, rank=1, reason='exception: ValueError: "x"', kind="breakpoint",
    created=1_700_000_000.25, coordinates={"dp": 1}, append_info=[{"epoch_num": 2}, None],
)  # fmt: skip
STATE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "n": 3, "e": torch.empty(0, 2)}
no_reset = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, STATE, INFO)
    return path


def reseal(raw: bytes) -> bytes:
    """Give a changed header the digest that belongs to it, as an attacker or a bug would."""
    start = raw.index(b'"mindx.header_digest":"') + len(b'"mindx.header_digest":"')
    raw = raw[:start] + NO_DIGEST.encode() + raw[start + 32 :]
    return raw[:start] + xxhash.xxh3_128(raw).hexdigest().encode() + raw[start + 32 :]


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of `path` with a change and a digest that fits."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    content = json.loads(data[8 : 8 + length])
    change(content)
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    path.write_bytes(reseal(struct.pack("<Q", len(text)) + text) + data[8 + length :])


# ------------------------------------------------------------------------------------------------ info
@given(
    st.builds(
        CheckpointInfo,
        run_id=st.text(),
        world_size=st.just(2**18),
        rank=st.integers(0, 2**18 - 1),
        step=st.integers(0, 2**63 - 1),
        epoch=st.integers(0, 2**63 - 1),
        step_in_epoch=st.integers(0, 2**63 - 1),
        batch_num=st.integers(0, 2**63 - 1),
        reason=st.text(st.characters(exclude_categories=[])),
        kind=st.text(),
        created=st.floats(allow_nan=False, allow_infinity=False),
        resumable=st.booleans(),
        coordinates=st.dictionaries(st.text(), st.integers(-(1 << 63), 1 << 63)),
        append_info=st.lists(st.recursive(st.none() | st.booleans() | st.text(), st.lists, max_leaves=4)),
    )
)
def test_info_round_trip(info: CheckpointInfo) -> None:
    assert CheckpointInfo.from_json(info.to_json()) == info
    assert CheckpointInfo.from_json(json.dumps({**json.loads(info.to_json()), "of a later version": 1})) == info


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", 3),
        ("world_size", "2"),
        ("world_size", 0),
        ("rank", 4),
        ("names", ["\ud800"]),
        ("reason", None),
        ("created", "now"),
        ("resumable", 1),
        ("coordinates", []),
        ("coordinates", {"dp": 0.5}),
        ("append_info", "text"),
    ],
)
def test_info_of_wrong_type_or_range_is_refused(field: str, value: object) -> None:
    with pytest.raises(CorruptCheckpointError, match=field):
        CheckpointInfo.from_json(json.dumps({**json.loads(INFO.to_json()), field: value}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000])
def test_info_that_is_not_an_object_is_refused(text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="info"):
        CheckpointInfo.from_json(text)


def test_what_json_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="append_info"):
        dataclasses.replace(INFO, append_info=[object()]).to_json()
    with pytest.raises(UnsupportedStateError, match="layout"):
        write_checkpoint(tmp_path / "x", STATE, INFO, layout={"w": object()})
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ good files
def test_header_tells_what_was_written(file: Path) -> None:
    header = read_header(file)
    assert header.info == INFO
    assert header.data_start % DATA_ALIGNMENT == 0
    assert header.file_size == file.stat().st_size == header.data_start + 6 * 4 + 5 * 2
    assert {name: (e.dtype, e.shape) for name, e in header.entries.items()} == {
        "w": ("F32", (2, 3)),
        "e": ("F32", (0, 2)),
        "b": ("BF16", (5,)),
    }
    assert header.digests["w"] == xxhash.xxh3_128(bits(STATE["w"])).hexdigest()  # type: ignore[arg-type]
    assert header.tree["n"] == 3
    assert header.layout == {}


def test_stock_safetensors_reads_all_types_and_names(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    state = {f"{dtype} «{n}»\n": tensor_of(dtype, (2, n), n) for dtype in DTYPES for n in (0, 1, 5)}
    write_checkpoint(path, {**state, "\ud800": torch.ones(1), "scalar": torch.tensor(3.0)}, INFO)
    assert not any(e.start % e.torch_dtype.itemsize for e in read_header(path).entries.values()), "all are aligned"
    loaded = load_file(path)
    assert loaded.keys() == {*state, "?", "scalar"}
    for name, tensor in state.items():
        assert bits(loaded[name]) == bits(tensor), name
    with safe_open(path, framework="pt") as opened:
        assert CheckpointInfo.from_json(opened.metadata()["mindx.checkpoint"]) == INFO


# ------------------------------------------------------------------------------------------------ bad files


def test_file_rewritten_by_stock_safetensors_is_not_ours_any_more(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(CorruptCheckpointError, match="another program"):
        read_header(file)


def test_newer_schema_is_foreign_and_names_the_remedy(file: Path) -> None:
    forge(file, lambda content: content["__metadata__"].update({"mindx.schema": "3"}))
    with pytest.raises(ForeignCheckpointError, match=r"schema 3.*newer"):
        read_header(file)


def test_a_file_that_is_longer_or_cut_off_anywhere(file: Path) -> None:
    size = file.stat().st_size
    for other in (size + 1, size - 1, 4097, 4096, 4095, 100, 9, 8, 7, 1, 0):
        os.truncate(file, other)
        with pytest.raises(CorruptCheckpointError) as caught:
            read_header(file)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize("length", [1, 2**27, 2**64 - 1])
def test_impossible_header_length_is_not_read(file: Path, length: int) -> None:
    with open(file, "r+b") as opened:
        opened.write(struct.pack("<Q", length))
    with pytest.raises(CorruptCheckpointError, match="impossible header length"):
        read_header(file)


def _shift(content: dict[str, Any], name: str, start: int, end: int) -> None:
    old = content[name]["data_offsets"]
    content[name]["data_offsets"] = [old[0] + start, old[1] + end]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: _shift(c, "b", 2, 2), "gap or overlap"),
        (lambda c: c["b"].update(data_offsets=[-10, 0]), "malformed"),
        (lambda c: c["b"].update(shape=[2**40, 2**40, 0]), "more bytes than a tensor can have"),
        (lambda c: c["b"].update(shape=[4]), "do not fit its shape"),
        (lambda c: c["b"].update(shape=[5.0]), "no whole numbers"),
        (lambda c: c["b"].update(shape=None), "TypeError"),
        (lambda c: c["b"].update(dtype="F31"), "unknown type"),
        (lambda c: c.pop("b"), "bytes instead of"),
        (lambda c: c.update(extra={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), "digests do not belong"),
        (lambda c: c["__metadata__"].update({"mindx.layout": "3"}), "layout"),
        (lambda c: c["__metadata__"].update({"mindx.checkpoint": "{}"}), "info"),
        (lambda c: c["__metadata__"].update({"number": 3}), "map of strings"),
    ],
)
def test_inconsistent_header_with_a_digest_that_fits(
    file: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    forge(file, change)
    with pytest.raises(CorruptCheckpointError, match=says) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_every_flipped_bit_is_found(file: Path) -> None:
    """One bit of each third byte of the file, in turn: prefix, JSON and data, and of some bytes of the padding."""
    good = file.read_bytes()
    data = bytearray(good)
    padding = range(good.rindex(b"}") + 1, DATA_ALIGNMENT)
    for position in sorted({*range(0, len(data), 3)} - {*padding} | {*padding[::97]}):
        data[position] ^= 1 << (position % 8)
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpointError):
            read_checkpoint(file)
        data[position] = good[position]
    file.write_bytes(data)
    read_checkpoint(file)


# ------------------------------------------------------------------------------------------------ odd places
def test_header_beyond_every_readers_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindx_elastic.persist.format.MAX_HEADER_BYTES", 10_000)
    tree, tensors = flatten({"table": list(range(10_000))})
    with pytest.raises(UnsupportedStateError, match="keep large tables in tensors"):
        HeaderDraft(place_tensors(tensors)).header(INFO, tree)
