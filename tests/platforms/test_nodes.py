"""Which ranks run on which node: the rank table, torchrun's variables, and what is neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.nodes import nodes_from_torchrun, parse_rank_table, read_node_map

TABLE = {
    "status": "completed",
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {"server_id": "a", "host_ip": "10.0.0.1", "device": [{"device_id": "0", "device_ip": "", "rank_id": "0"}]},
        {"server_id": "b", "device": [{"device_id": "0", "rank_id": "1"}, {"device_id": "1", "rank_id": 2}]},
    ],
}


def test_a_rank_table(tmp_path: Path) -> None:
    path = tmp_path / "hccl.json"
    path.write_text(json.dumps(TABLE))
    link = tmp_path / "link"  # as a mount has it
    link.symlink_to(path)
    for each in (path, link):
        assert read_node_map(each).ranks_of == {"a": {0}, "10.0.0.1": {0}, "b": {1, 2}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not readable JSON"),
        ("[]", "where an object"),
        ("{}", "is no rank table"),
        ('{"server_list": 3}', "no list but 3"),
        ('{"server_list": [3]}', "server that is not understood"),
        ('{"server_list": [{"device": [3]}]}', "server that is not understood"),
        ('{"server_list": [{"device": [{"rank_id": "x"}]}]}', "without a usable rank_id"),
        ('{"server_list": [{"device": [{"rank_id": 1}]}, {"device": [{"rank_id": "1"}]}]}', "names rank 1 twice"),
    ],
)
def test_what_is_no_rank_table(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_rank_table(text)


# --- nodes ---


def test_a_node_is_known_by_all_its_names() -> None:
    servers = [
        {"server_id": "a", "host_ip": "10.0.0.1", "container_ip": "172.0.0.1", "device": [{"rank_id": "0"}]},
        {"server_id": "b", "host_ip": None, "device": [{"rank_id": "1"}]},
        {"server_id": "c", "host_ip": "10.0.0.1", "device": [{"rank_id": "2"}]},
        {"server_id": {"x": 1}, "device": [{"rank_id": "3"}]},
    ]
    nodes = parse_rank_table(json.dumps({"status": "completed", "server_list": servers}))
    assert {name: set(ranks) for name, ranks in nodes.ranks_of.items()} == {
        "a": {0},
        "172.0.0.1": {0},
        "b": {1},
        "c": {2},
        "10.0.0.1": {0, 2},  # two pods on one machine
    }
    assert set(nodes.find(" a ") or ()) == {0} and nodes.find("None") is None
    with pytest.raises(UsageError, match="no node 'd'; its nodes: a, 10"):
        nodes.ranks("d")


def test_a_table_that_is_not_complete_tells_of_no_nodes() -> None:
    for text in ('{"status": "initializing", "server_list": []}', '{"status": "initializing"}', '{"server_list": []}'):
        with pytest.raises(ValueError, match="is not complete"):
            parse_rank_table(text)


def test_nodes_from_the_environment_of_torchrun() -> None:
    nodes = nodes_from_torchrun({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "RANK": "3"})
    assert nodes is not None
    assert set(nodes.find("2") or ()) == set(nodes.find("node 2") or ()) == {4, 5} and nodes.find("3") is None
    assert nodes_from_torchrun({}) is None and nodes_from_torchrun({"WORLD_SIZE": "6"}) is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("5", "2", "0", "0"), "different numbers of ranks"),
        (("6", "2", "3", ""), "different numbers of ranks"),
        (("6", "2", "1", "1"), "different numbers of ranks"),
        (("6", "0", "", ""), "expected 1 <= LOCAL_WORLD_SIZE"),
        (("2", "4", "", ""), "expected 1 <= LOCAL_WORLD_SIZE"),
        (("x", "4", "", ""), "WORLD_SIZE='x' is no whole number"),
        (("9999999", "1", "", ""), "expected 1 <= LOCAL_WORLD_SIZE"),
    ],
)
def test_an_environment_that_contradicts_itself(values: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        nodes_from_torchrun(dict(zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RANK"), values, strict=True)))
