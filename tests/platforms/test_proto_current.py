"""The generated code that is checked in is what ``make proto`` makes, and goes with MindSpore's own in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_mindspores_messages_may_be_in_the_process(first: str) -> None:
    """``import mindspore`` switches protobuf to its pure-Python runtime, which has one pool of names for all."""
    code = f"""
import importlib
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import api_implementation
assert api_implementation.Type() == "python", api_implementation.Type()
def theirs():
    file = descriptor_pb2.FileDescriptorProto(name="node_strategy.proto", package="mindspore.straspb", syntax="proto2")
    for name in ("ParallelStrategyMap", "ParallelStrategy", "ParallelLayouts", "ParallelGroupMap", "DevMatrix"):
        file.message_type.add(name=name).field.add(name="theirs", number=1, label=1, type=13)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    found = descriptor_pool.Default().FindMessageTypeByName("mindspore.straspb.ParallelStrategyMap")
    assert [field.name for field in found.fields] == ["theirs"]
def ours():
    module = importlib.import_module("mindx_elastic.platforms.strategy_pb2")
    found = module.ParallelStrategyMap.FromString(b"\\x08\\x01")
    assert found.current_stage == 1
order = [ours, theirs]
for each in order if {first!r} == "ours" else reversed(order):
    each()
print("both")
"""
    env = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "both\n", done.stderr
