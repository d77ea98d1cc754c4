"""The server of copies, asked by somebody who wants to do harm, or who breaks down on the way."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from mindx_elastic.config import RankInfo
from mindx_elastic.mirror.server import Server
from mindx_elastic.mirror.wire import MAX_FILE_BYTES, Channel, Endpoint, ask, header_digest, rank_of
from mindx_elastic.persist.format import open_checkpoint, read_header
from mindx_elastic.persist.writer import copied_file
from tests.checkpoint_files import write
from tests.harness import wait_until

NAME = "rank_1/resnet-2_7.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    """Of rank 0; keeps copies of rank 1."""
    server = Server(RankInfo(rank=0, world_size=3), [root], [1], "127.0.0.1", patience_s=0.5)
    yield server
    server.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "mindx-mirror"]


def own_file(folder: Path, **fields: Any) -> Path:
    return write(folder / "own" / "resnet-2_7.safetensors", **{"rank": 1, "world_size": 3, **fields})


def put(endpoint: Endpoint, path: Path, **fields: Any) -> dict[str, Any]:
    """Send a file as `Mirror` does; returns the last answer."""
    with open_checkpoint(path) as (fd, header):
        size, digest = header.file_size, header_digest(fd, header)
        fields = {"root": 0, "name": NAME, "size": size, "header": digest, "rank": 1, **fields}
        with ask(endpoint, fields.pop("rank"), "put", **fields) as channel:
            first = channel.answer()
            if "send" not in first:
                return first
            channel.send_file(fd, size)
            return channel.answer()


def files(root: Path) -> list[str]:
    """Everything below `root`, temporary files included."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def serves(server: Server) -> bool:
    with ask(server.endpoint, 1, "here") as channel:
        return channel.answer() == {}


def raw(server: Server, data: bytes) -> bytes:
    """What comes back for `data`, until the server ends the connection."""
    with socket.create_connection((server.endpoint.host, server.endpoint.port), 10) as sock:
        sock.sendall(data)
        back = b""
        try:
            while piece := sock.recv(4096):
                back += piece
        except ConnectionResetError:
            pass
        return back


def test_a_file_arrives_as_it_is_and_comes_back(server: Server, root: Path, tmp_path: Path) -> None:
    path = own_file(tmp_path)
    assert put(server.endpoint, path) == {}
    assert files(root) == [NAME]
    assert (root / NAME).read_bytes() == path.read_bytes()
    assert put(server.endpoint, path) == {"have": True}, "what is there is not sent again"
    with ask(server.endpoint, 2, "get", root=0, name=NAME) as channel:
        size = channel.answer()["size"]
        with copied_file(tmp_path / "back", size, lambda temp: None) as blocks:
            channel.receive_file(blocks, size)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_nothing_is_done_without_the_token(server: Server, root: Path, tmp_path: Path) -> None:
    put(server.endpoint, own_file(tmp_path))
    for token in ("", "wrong", server.endpoint.token[:-1], "\N{SNOWMAN}", None, ["x"]):
        stranger = Endpoint(server.endpoint.host, server.endpoint.port, token)  # type: ignore[arg-type]
        for op in ("get", "drop", "here"):
            with pytest.raises(ConnectionError), ask(stranger, 1, op, root=0, name=NAME, run_id="run-a") as channel:
                channel.answer()
        with pytest.raises(ConnectionError):
            put(stranger, own_file(tmp_path, step=8))
    assert files(root) == [NAME]
    assert read_header(root / NAME).info.step == 17
    assert serves(server)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "rank_1/../../x.safetensors",
        "rank_1/..safetensors",
        "rank_1/.hidden.safetensors",
        "/rank_1/x.safetensors",
        "rank_1//x.safetensors",
        "rank_1/x.safetensors\0",
        "rank_1/x\n.safetensors",
        "rank_1/x.txt",
        "rank_01/x.safetensors",
        "x.safetensors",
        "events.jsonl",
        "quarantine/rank_1/x.safetensors",
        "tft_saved_checkpoints-step_7/../rank_1/x.safetensors",
        f"rank_1/{'x' * 300}.safetensors",
        "",
        None,
    ],
)
def test_only_places_of_our_own_writer_are_taken(server: Server, root: Path, tmp_path: Path, name: Any) -> None:
    assert rank_of(name) is None
    path = own_file(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ConnectionError, match=r"OSError|its name is not text"):
        put(server.endpoint, path, name=name)
    for op in ("get", "drop"):
        with pytest.raises(ConnectionError), ask(server.endpoint, 1, op, root=0, name=name, run_id="run-a") as channel:
            channel.answer()
    assert files(tmp_path) == before
    assert serves(server)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 2}, "copies elsewhere"),
        ({"name": "rank_0/x.safetensors"}, "not a file of rank 1"),
        ({"name": "rank_3/x.safetensors"}, "not a place"),
        ({"root": 1}, "no directory"),
        ({"size": 0}, "not a size"),
        ({"size": "8000"}, "its size"),
        ({"size": MAX_FILE_BYTES + 1}, "not a size"),
        ({"size": MAX_FILE_BYTES}, "OSError"),  # no disk has that
        ({"op": "exec"}, "its op"),
    ],
)
def test_what_cannot_be_is_refused_before_a_byte_is_sent(
    server: Server, root: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    request = {"root": 0, "name": NAME, "size": 8000, "header": "", "rank": 1, "op": "put", **fields}
    channel = ask(server.endpoint, request.pop("rank"), request.pop("op"), **request)
    with channel, pytest.raises(ConnectionError, match=message):
        channel.answer()
    assert files(root) == []
    assert serves(server)


def start_put(server: Server, size: int) -> Channel:
    channel = ask(server.endpoint, 1, "put", root=0, name=NAME, size=size, header="")
    assert channel.answer() == {"send": True}
    return channel


def test_a_byte_that_was_changed_on_the_way_is_seen(server: Server, root: Path, tmp_path: Path) -> None:
    data = bytearray(own_file(tmp_path).read_bytes())
    digest = xxhash.xxh3_128(bytes(data)).digest()
    data[-5] ^= 1
    with start_put(server, len(data)) as channel:
        channel._send(bytes(data) + digest)
        with pytest.raises(ConnectionError, match="damaged on its way"):
            channel.answer()
    assert files(root) == []


@pytest.mark.parametrize("sent", [0, 1, 5000])
def test_a_sender_that_dies_leaves_nothing(server: Server, root: Path, tmp_path: Path, sent: int) -> None:
    data = own_file(tmp_path).read_bytes()
    with start_put(server, len(data)) as channel:
        assert len(files(root)) == 1, "the space is reserved"
        channel._send(data[:sent])
    wait_until(lambda: files(root) == [], "the end of the temporary file")
    assert serves(server)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">4sI", b"MXE1", 2) + b"[]",
        struct.pack(">4sI", b"MXE1", 12000) + b"[" * 12000,
    ],
)
def test_what_is_not_our_protocol_gets_no_answer(server: Server, data: bytes) -> None:
    assert raw(server, data) == b""
    assert serves(server)


def test_links_and_other_files_are_not_given_away(server: Server, root: Path, tmp_path: Path) -> None:
    secret = own_file(tmp_path)
    (root / "rank_1").mkdir()
    (root / NAME).symlink_to(secret)
    (root / "rank_1" / "text.safetensors").write_text("secret")
    for name in (NAME, "rank_1/text.safetensors", "rank_1/absent.safetensors"):
        with ask(server.endpoint, 2, "get", root=0, name=name) as channel, pytest.raises(ConnectionError):
            channel.answer()
    assert put(server.endpoint, secret) == {}, "a link is replaced, not followed"
    assert not (root / NAME).is_symlink()


def test_only_periodic_files_of_the_same_run_and_rank_are_deleted(server: Server, root: Path, tmp_path: Path) -> None:
    def drop(name: str, run_id: str = "run-a", rank: int = 1) -> None:
        with ask(server.endpoint, rank, "drop", root=0, name=name, run_id=run_id) as channel:
            channel.answer()

    put(server.endpoint, own_file(tmp_path))
    put(server.endpoint, own_file(tmp_path, kind="breakpoint"), name="rank_1/b.safetensors")
    write(root / "rank_0" / "own.safetensors", rank=0, world_size=3)
    for arguments in ((NAME, "run-b"), ("rank_1/b.safetensors",), ("rank_0/own.safetensors",), (NAME, "run-a", 2)):
        with pytest.raises(ConnectionError):
            drop(*arguments)
    assert len(files(root)) == 3
    drop(NAME)
    drop(NAME)
    assert files(root) == ["rank_0/own.safetensors", "rank_1/b.safetensors"]


def test_waiting_ends_when_the_sources_have_gone(server: Server) -> None:
    channel = ask(server.endpoint, 1, "here")
    channel.answer()
    server.wait_for_sources(float("inf"), quiet_s=0.01)  # nothing comes, although it is there
    thread = threading.Thread(target=server.wait_for_sources, args=(float("inf"),), kwargs={"quiet_s": 600})
    thread.start()
    wait_until(lambda: server._changed._waiters, "the wait")  # type: ignore[attr-defined]
    second = os.dup(channel._socket.fileno())  # as a forked worker of a loader has it
    with channel:
        pass
    thread.join(60)
    assert not thread.is_alive(), "the worker's copy of the connection does not matter"
    os.close(second)
