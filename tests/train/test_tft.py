"""`TFTRegister` and `OptTFTWrapper`: MindSpore's arguments and errors, torch's behaviour, the documented tree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.errors import GracefulExit, UsageError
from mindx_elastic.guard import saver as saving_module
from mindx_elastic.guard.policy import ExitPolicy, keep_consistent
from mindx_elastic.persist.format import read_header
from mindx_elastic.train import OptTFTWrapper, TFTRegister
from mindx_elastic.train.policies import check_alike
from tests.start.shared_store import on_all_ranks
from tests.train.small_job import same, weights
from tests.train.test_resume import At, Broken, explode, sigterm, train


@pytest.fixture(autouse=True)
def _tft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1}")
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")


def register(path: Any = "ttp") -> TFTRegister:
    return TFTRegister(0, "127.0.0.1", 30051, path)


def tree(root: Path = Path("ttp")) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.safetensors"))


# --- arguments, as MindSpore checks them ---


@pytest.mark.parametrize("text", [None, "{TTP:0}"])
def test_both_must_be_switched_on(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    if text is None:
        monkeypatch.delenv("MS_ENABLE_TFT")
    else:
        monkeypatch.setenv("MS_ENABLE_TFT", text)
    for make in (register, lambda: OptTFTWrapper(optimizer())):
        with pytest.raises(ValueError, match=r"export MS_ENABLE_TFT='\{TTP:1\}'"):
            make()


def test_other_switches_are_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{UCE:1 ARF:1 TSP:1 RSC:1 TRE:1}")
    register()
    (record,) = caplog.records
    arf, rest = "ARF is mindx-elastic run --recover in-place; ", "nothing is done for UCE"
    rsc = "RSC is mindx-elastic run, which reads reset.json and starts the ranks again; "
    others = f'{rsc}TRE is Guard(odd="back") in a loop of your own; TSP is mindx-elastic pause, and resume; '
    assert record.getMessage() == f"MS_ENABLE_TFT: TTP is on; switched on otherwise here: {arf}{others}{rest}"
    monkeypatch.setenv("MINDX_RECOVER", "in-place")
    monkeypatch.setenv("MS_ENABLE_TFT", "{ARF:1}")
    register()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ctrl_rank_id": -1}, "ctrl_rank_id=-1"),
        ({"ctrl_ip": ""}, "ctrl_ip=''"),
        ({"ctrl_port": 1023}, "ctrl_port=1023"),
        ({"ckpt_save_path": None}, "ckpt_save_path=None"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], named: str) -> None:
    right = {"ctrl_rank_id": 0, "ctrl_ip": "127.0.0.1", "ctrl_port": 30051, "ckpt_save_path": "x"}
    with pytest.raises(UsageError, match=named):
        TFTRegister(**{**right, **change})


# --- the wish ---


@pytest.mark.parametrize(
    ("kind", "replicated", "kept"),
    [("peer", False, ["breakpoint"]), ("peer", True, ["breakpoint", "ttp"]), ("fault", False, ["breakpoint", "ttp"])],
)
def test_only_good_replicas_are_saved_when_a_rank_is_gone(kind: str, replicated: bool, kept: list[str]) -> None:
    policies: Sequence[ExitPolicy] = [
        *mx.ExceptionCheckpoint(directory="x").exit_policies(),
        *register().exit_policies(),
    ]
    assert [policy.kind for policy in keep_consistent(policies, kind, replicated=replicated)] == kept


def test_a_rank_without_it_is_named_on_all_ranks() -> None:
    said = on_all_ranks(2, lambda rank, exchange: check_alike([register("here")] if rank == 1 else [], exchange))
    assert all("rank 0 none; rank 1 TFTRegister. A step counts" in str(each) for each in said), said


# --- in a training ---


@pytest.mark.parametrize("action", [sigterm, explode])
def test_the_tree_of_one_rank_and_the_resume(action: Any) -> None:
    reference, _ = train([])
    with pytest.raises((GracefulExit, Broken)):
        train([register(), At(8, action)])
    assert tree() == ["tft_saved_checkpoints-step_8/rank_0/ttp_rank_0-2_2.safetensors"]
    path = Path("ttp") / tree()[0]
    info = read_header(path).info
    assert (info.step, info.kind, info.resumable) == (8, "ttp", True)
    saved = [json.loads(line) for line in Path("ttp/events.jsonl").read_text().splitlines()]
    assert {event["path"] for event in saved if event["event"] in ("save", "durable")} == {str(path.resolve())}
    model, _ = train([register()])
    assert model.resumed_from_step == 8 and same(weights(model), weights(reference))


def test_beside_an_exception_checkpoint_both_names_hold_the_step() -> None:
    with pytest.raises(Broken):
        train([mx.ExceptionCheckpoint(prefix="net", directory="ckpt"), register(), At(8, explode)])
    assert [path.name for path in Path("ckpt").glob("*.safetensors")] == ["net-2_2_breakpoint.safetensors"]
    assert tree() == ["tft_saved_checkpoints-step_8/rank_0/ttp_rank_0-2_2.safetensors"]
    for callback in (register(), mx.ExceptionCheckpoint(prefix="net", directory="ckpt")):
        assert train([callback])[0].resumed_from_step == 8


def test_a_rename_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    Path("ttp").mkdir()
    Path("ttp/tft_saved_checkpoints-step_8").write_text("a file has this name")
    with pytest.raises(Broken):
        train([register(), At(8, explode)])
    assert "is durable, but could not be moved" in caplog.text
    assert tree() == ["tft_saved_checkpoints-step_8_tmp/rank_0/ttp_rank_0-2_2.safetensors"]
    assert train([register()])[0].resumed_from_step == 8


def test_a_tree_that_is_renamed_under_a_writer_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank took this one for dead and gave the tree its final name while this one was writing into it."""
    write = getattr(saving_module, "write_checkpoint")  # noqa: B009
    renamed: list[Path] = []

    def write_and_rename(path: Any, *args: Any, **options: Any) -> Any:
        if not renamed:
            tree_folder = Path(path).parent.parent
            renamed.append(tree_folder.rename(tree_folder.with_name(tree_folder.name.removesuffix("_tmp"))))
        return write(path, *args, **options)

    monkeypatch.setattr(saving_module, "write_checkpoint", write_and_rename)
    with pytest.raises(Broken):
        train([register(), At(8, explode)])
    assert renamed and tree() == ["tft_saved_checkpoints-step_8/rank_0/ttp_rank_0-2_2.safetensors"]
    assert not Path("ttp/tft_saved_checkpoints-step_8_tmp").exists()


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    def run(fail: bool) -> int | None:
        model = nn.Linear(4, 2)
        wrapped = OptTFTWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        policies = register(tmp_path).exit_policies()
        with mx.Guard(model=model, optimizer=wrapped, directory=tmp_path, policies=policies) as guard:
            for _ in guard.steps(3):
                model(torch.ones(1, 4)).sum().backward()
                wrapped.step()
                wrapped.zero_grad()
                guard.step_end()
            if fail:
                raise Broken
        return guard.resumed_from_step

    with pytest.raises(Broken):
        run(fail=True)
    assert tree(tmp_path) == ["tft_saved_checkpoints-step_3/rank_0/ttp_rank_0-1_3.safetensors"]
    assert run(fail=False) == 3


# --- the optimizer's wrapper ---


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=0.1)


def test_it_is_the_optimizer() -> None:
    inner = optimizer()
    assert OptTFTWrapper(inner) is inner
