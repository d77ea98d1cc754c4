"""The rank table: which rank runs where; anything else is a ValueError that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindx_elastic.alarm.rank_table import parse_rank_table, read_rank_table

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
    table = read_rank_table(path)
    assert table.completed and table.ranks == {0, 1, 2}
    server = table.server_of(1)
    assert server is not None and (server.server_id, server.host_ip) == ("b", "") and server.ranks == {1, 2}
    assert table.server_of(3) is None
    assert not parse_rank_table('{"status": "initializing"}').completed


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
