"""The generated code that is checked in is what ``make proto`` makes, and goes with MindSpore's own in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindx_elastic.platforms.protobuf import messages
from tests.platforms.generate_proto import PROTOS, ROOT, find_protoc, generate

needs_protoc = pytest.mark.skipif(not find_protoc().exists(), reason="no protoc for this platform")


@needs_protoc
@pytest.mark.parametrize("proto", PROTOS)
def test_the_generated_code_is_current(proto: str, tmp_path: Path) -> None:
    checked_in = ROOT / proto.replace(".proto", "_pb2.py")
    assert generate(proto, tmp_path).read_bytes() == checked_in.read_bytes(), "run `make proto`"


@pytest.mark.parametrize("proto", PROTOS)
def test_every_supported_protobuf_runs_it(proto: str) -> None:
    text = (ROOT / proto.replace(".proto", "_pb2.py")).read_text()
    version = re.search(r"Protobuf Python Version: (\d+)\.(\d+)", text)
    floor = re.search(r'"protobuf>=(\d+)', (ROOT / "pyproject.toml").read_text())
    assert version is not None and floor is not None
    assert int(version[1]) <= int(floor[1])
    assert (
        "ValidateProtobufRuntimeVersion" not in text
    )  # code that has it refuses older runtimes, and those 2 majors on


@pytest.mark.parametrize("runtime", ["python", "upb"])
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_mindspores_messages_may_be_in_the_process(runtime: str, first: str) -> None:
    """``import mindspore`` switches protobuf to its pure-Python runtime, which has one pool of names for all."""
    code = f"""
import importlib
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import api_implementation
assert api_implementation.Type() == {runtime!r}, api_implementation.Type()
def theirs():
    file = descriptor_pb2.FileDescriptorProto(name="node_strategy.proto", package="mindspore.straspb", syntax="proto2")
    for name in ("ParallelStrategyMap", "ParallelStrategy", "ParallelLayouts", "ParallelGroupMap", "DevMatrix"):
        file.message_type.add(name=name).field.add(name="theirs", number=1, label=1, type=13)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    found = descriptor_pool.Default().FindMessageTypeByName("mindspore.straspb.ParallelStrategyMap")
    assert [field.name for field in found.fields] == ["theirs"]
def ours():
    importlib.import_module("mindx_elastic.platforms.resume_plan_pb2")
    module = importlib.import_module("mindx_elastic.platforms.strategy_pb2")
    found = module.ParallelStrategyMap.FromString(b"\\x08\\x01")
    assert found.current_stage == 1
order = [ours, theirs]
for each in order if {first!r} == "ours" else reversed(order):
    each()
print("both")
"""
    env = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": runtime}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "both\n", done.stderr


def test_fields_of_mindspore_have_its_numbers_types_and_labels() -> None:
    expected = {
        "ParallelStrategy": "rep uint32 dim 1",
        "ParallelStrategys": "req uint32 stage 1, rep ParallelStrategy parallel_strategy 2",
        "ParallelStrategyItem": "req string node_name 1, req ParallelStrategys parallel_strategys 2",
        "ParallelStrategyMap": "req uint32 current_stage 1, rep ParallelStrategyItem parallel_strategy_item 2, "
        "rep ParallelLayoutItem parallel_layout_item 3",
        "ParallelLayoutItem": "req string param_name 1, req ParallelLayouts parallel_layouts 2",
        "ParallelLayouts": "rep DevMatrix dev_matrix 1, rep TensorMap tensor_map 2, rep ParamSplitShape "
        "param_split_shape 3, rep IndicesOffset indices_offset 4, req int32 field 5, "
        "req int32 opt_weight_shard_step 6, req int32 opt_weight_shard_size 7",
        "DevMatrix": "rep uint32 dim 1",
        "TensorMap": "rep int32 dim 1",
        "ParamSplitShape": "rep int64 dim 1",
        "IndicesOffset": "rep int64 dim 1",
        "ParallelGroupRanks": "rep uint32 dim 1",
        "ParallelGroupItem": "req string group_name 1, req ParallelGroupRanks parallel_group_ranks 2",
        "ParallelGroupMap": "rep ParallelGroupItem parallel_group_item 1, "
        "opt ParallelGroupRanks ckpt_restore_rank_list 2",
    }
    from google.protobuf import descriptor_pb2

    file = descriptor_pb2.FileDescriptorProto()
    messages().DESCRIPTOR.CopyToProto(file)
    labels = {1: "opt", 2: "req", 3: "rep"}
    types = {3: "int64", 5: "int32", 9: "string", 13: "uint32"}
    found = {}
    for message in file.message_type:
        fields = [field for field in message.field if field.number < 1000]
        assert message.name == "ExactTensor" or not any(field.options.packed for field in fields)
        found[message.name] = ", ".join(
            f"{labels[f.label]} {types.get(f.type) or f.type_name.rpartition('.')[2]} {f.name} {f.number}"
            for f in fields
        )
    del found["ExactTensor"]
    assert found == expected
