"""Group info files, and the stand-in for a checkpoint that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.agreement.gather import Answer
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import SaveError, UsageError
from mindx_elastic.platforms.at_start import GroupInfoPart
from mindx_elastic.platforms.group_info import (
    get_ckpt_path_with_strategy,
    groups_of,
    restore_group_info_list,
    save_group_info,
    write_group_info_file,
)
from mindx_elastic.platforms.strategy_file import messages, save_strategy
from tests import checkpoint_files
from tests.platforms.test_strategy_file import layout_item, strategy_map


def dp_tp(dp: int, tp: int) -> Strategy:
    layout = Layout((dp, tp), ("R", "S(0)"), (), ("dp", "tp"))  # type: ignore[arg-type]
    return Strategy(dp * tp, (TensorSpec("w", (16, 4), layout), TensorSpec("b", (16,), layout)))


# --- the file ---


def test_the_bytes_of_mindspore(tmp_path: Path) -> None:
    path = tmp_path / "group_info.pb"
    text = (
        "0a 0a 0a 02 6470 12 04 08 00 08 04"  # group "dp": ranks 0 and 4
        "0a 0a 0a 02 7470 12 04 08 00 08 01"  # group "tp": ranks 0 and 1
        "12 05 08 00 08 ac 02"  # restore ranks 0 and 300
    )
    path.write_bytes(bytes.fromhex(text.replace(" ", "")))
    assert restore_group_info_list(str(path)) == [0, 300]
    assert save_group_info(tmp_path / "ours.pb", {"dp": [0, 4], "tp": [0, 1]}, [0, 300]) == tmp_path / "ours.pb"
    assert (tmp_path / "ours.pb").read_bytes() == path.read_bytes()


def test_what_a_rank_writes_at_its_start(tmp_path: Path) -> None:
    path = write_group_info_file(dp_tp(2, 4), 5, tmp_path / "new" / "group_info.pb")
    found = messages().ParallelGroupMap.FromString(path.read_bytes())
    groups = {item.group_name: list(item.parallel_group_ranks.dim) for item in found.parallel_group_item}
    assert (groups, restore_group_info_list(path)) == ({"dp-1-5": [1, 5], "tp-4-7": [4, 5, 6, 7]}, [1, 5])
    sharded = Strategy(8, (*dp_tp(2, 4).tensors, TensorSpec("m", (8,), Layout((8,), ("S(0)",)))))  # type: ignore[arg-type]
    write_group_info_file(sharded, 5, path)
    assert restore_group_info_list(path) == [5]  # nobody has its part of the optimizer's state
    assert groups_of(sharded, 5)["8-0-7"] == tuple(range(8))
    with pytest.raises(UsageError, match="rank 8 holds nothing"):
        write_group_info_file(sharded, 8, path)
    with pytest.raises(SaveError, match=r"group_info\.pb/x"):
        write_group_info_file(sharded, 0, path / "x")


# --- a stand-in ---


def write(root: Path, *ranks: int) -> None:
    for rank in ranks:
        path = root / f"rank_{rank}" / "resnet-2_7_breakpoint.safetensors"
        checkpoint_files.write(path, rank=rank, world_size=8)


@pytest.fixture(params=["group info", "group info of another rank", "strategy", "json"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What says that ranks 1 and 5 hold the same."""
    if "group" in request.param:
        return write_group_info_file(dp_tp(2, 4), 1 if "another" in request.param else 5, tmp_path / "group_info.pb")
    return save_strategy(tmp_path / ("s.json" if request.param == "json" else "s.ckpt"), dp_tp(2, 4))


def test_a_replica_stands_in(source: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "ckpt" / "rank_5" / "resnet-2_7_breakpoint.safetensors"
    other = str(wanted).replace("rank_5", "rank_1")
    write(tmp_path / "ckpt", 0, 1, 4, 5)
    assert get_ckpt_path_with_strategy(str(wanted), str(source)) == str(wanted)
    wanted.unlink()
    assert get_ckpt_path_with_strategy(wanted, source) == other
    checkpoint_files.flip_bit_in_header(Path(other))
    assert get_ckpt_path_with_strategy(wanted, source) is None


def test_files_of_other_programs_count_when_they_are_there(tmp_path: Path) -> None:
    source = tmp_path / "s.ckpt"
    items = [
        layout_item("w", (2, 4), (0, -1)),
        layout_item("accu_grads.w", (2, 4), (0, 1)),
        layout_item("x", (8,), (-1,)),
    ]
    source.write_bytes(strategy_map(*items))
    for rank in (1, 2):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}" / "net_rank_1-3_4.ckpt").write_bytes(b"\x0a\x03abc")
    path = tmp_path / "rank_5" / "net_rank_5-3_4.ckpt"  # the number stands in the file's name too
    assert get_ckpt_path_with_strategy(path, source) == str(tmp_path / "rank_1" / "net_rank_1-3_4.ckpt")
    (tmp_path / "rank_1" / "net_rank_1-3_4.ckpt").write_bytes(b"")
    assert get_ckpt_path_with_strategy(path, source) is None


def test_the_file_of_another_rank_or_job_is_an_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="says nothing of rank 9"):
        get_ckpt_path_with_strategy(tmp_path / "rank_9" / "x.safetensors", source)
    with pytest.raises(UsageError, match="there is no such file"):
        get_ckpt_path_with_strategy(tmp_path / "rank_1" / "x.safetensors", tmp_path / "none.pb")


def test_ranks_of_one_path_write_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = []
    for rank, path in enumerate(("group_info.pb", "group_info.pb", "own/group_info.pb", "")):
        monkeypatch.setenv("GROUP_INFO_FILE", path)
        parts.append(GroupInfoPart(RankInfo(rank=rank, world_size=4)))
    merged = parts[0].merge([part.say() for part in parts])
    assert parts[0].is_wanted_somewhere and merged.own is not None
    for part, own in zip(parts, merged.own, strict=True):
        part.hear(Answer(None, own, list))
        if part.is_wanted:
            part.write(dp_tp(2, 2))
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pb")}
    assert written == {"rank_0/group_info.pb", "rank_1/group_info.pb", "own/group_info.pb"}
