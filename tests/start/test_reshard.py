"""Tensors put together from other ranks' files: byte for byte, in little memory, each read once and checked."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import REPLICATE, Layout, Shard
from mindx_elastic.core.owners import Trust
from mindx_elastic.errors import CorruptCheckpointError, MismatchError
from mindx_elastic.persist.catalog import read_entries
from mindx_elastic.persist.entries import TensorEntry
from mindx_elastic.persist.format import Header
from mindx_elastic.persist.reader import Checkpoint, read_checked
from mindx_elastic.persist.storage import QUARANTINE
from mindx_elastic.start.facts import Refusal, ResumePlan, World
from mindx_elastic.start.file_facts import facts_of
from mindx_elastic.start.planner import plan_resume
from mindx_elastic.start.reshard import Parts, assemble
from mindx_elastic.start.restore import Target
from mindx_elastic.start.shares import Share, ShareReader
from tests.checkpoint_files import flip_bit_in_data
from tests.harness import no_descriptor_left
from tests.persist.states import bits, tensor_of
from tests.start.finding import found_on
from tests.start.strategies import layout_of as layout
from tests.start.worlds import Saved, cut, plan_for, resharded, target_of


def assemble_for(plan: ResumePlan, rank: int, target: Target) -> Checkpoint:
    with Parts(plan, plan.ranks[rank]) as parts:
        return assemble(parts, target.blueprint)


WHOLE = layout([1], "R")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return tensor_of(dtype, shape, math.prod(shape) + len(shape))


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    assert bits(actual) == bits(expected), what


def same_for_all(states: Sequence[Mapping[str, Any]], name: str, tensor: torch.Tensor, new: Layout) -> None:
    for rank, state in enumerate(states):
        assert_same_bits(state["model"][name], cut(tensor, new, rank), f"{name} on rank {rank} under {new}")


# --- any layout to any other ---


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> Layout:
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).filter(lambda m: math.prod(m) <= 6))
    choices = [REPLICATE, *(Shard(dim) for dim in range(ndim))]
    placements = [draw(st.sampled_from(choices)) for _ in mesh]
    if len(mesh) == 2 and placements[0] == placements[1] and placements[0].dim is not None and mesh[1] > 1:
        placements[0] = draw(st.sampled_from([placements[0], Shard(placements[0].dim, mesh[1])]))
    ranks = draw(st.permutations(range(math.prod(mesh))))
    return Layout(tuple(mesh), tuple(placements), ranks)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layout_to_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("any")
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3))
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
    first = data.draw(layouts(len(shapes[0])))
    old_size = first.size
    same_size = layouts  # every tensor of a world has its own layout over all of its ranks
    tensors = {}
    for number, shape in enumerate(shapes):
        laid = first if number == 0 else data.draw(same_size(len(shape)).filter(lambda one: one.size <= old_size))
        if laid.size < old_size:  # repeated over the rest
            laid = Layout((old_size,), (REPLICATE,))
        tensors[f"t{number}"] = (numbers(*shape, dtype=data.draw(st.sampled_from(dtypes))), laid)
    moments = {name: numbers(*t.shape, dtype=torch.float64) for name, (t, _) in tensors.items()}
    Saved(old_size, tensors, moments).write(root)
    wanted = data.draw(layouts(len(shapes[0])))
    new = {
        name: (tuple(t.shape), wanted if number == 0 else Layout((wanted.size,), (REPLICATE,)))
        for number, (name, (t, _)) in enumerate(tensors.items())
    }
    states = resharded(root, wanted.size, new) if wanted != first else []
    for number, (name, (tensor, _)) in enumerate(tensors.items() if states else ()):
        same_for_all(states, name, tensor, new[name][1])
        for rank, state in enumerate(states):
            found = state["optimizer"]["state"][number]
            assert_same_bits(found["exp_avg"], cut(moments[name], new[name][1], rank), f"{name} on rank {rank}")
            assert found["step"].item() == 7 and found["note"] == f"of {name}"


def test_tied_weights_stay_tied_in_what_they_hold(tmp_path: Path) -> None:
    weight = numbers(8, 3)
    Saved(4, {"embedding": (weight, layout([4], "S(0)"))}, {"embedding": weight + 1}, tied={"head": "embedding"}).write(
        tmp_path
    )
    new = layout([3], "S(0)")
    target = target_of(3, {"embedding": ((8, 3), new), "head": ((8, 3), new)}, [["embedding"]], 1)
    state = assemble_for(plan_for(tmp_path, target), 1, target).state
    assert_same_bits(state["model"]["embedding"], weight[3:6])
    assert_same_bits(state["model"]["head"], weight[3:6])
    assert_same_bits(state["optimizer"]["state"][0]["exp_avg"], weight[3:6] + 1)


# --- the optimizer ---

TWO = {
    "a": (numbers(6, 2), layout([2], "S(0)")),
    "b": (numbers(4), layout([2], "S(0)")),
    "c": (numbers(3), layout([2], "R")),
}
WANTED = {"a": ((6, 2), layout([3], "S(0)")), "b": ((4,), layout([3], "S(0)")), "c": ((3,), layout([3], "R"))}
MOMENTS = {name: tensor * 2 for name, (tensor, _) in TWO.items()}


def test_groups_keep_their_options_and_their_parameters_are_known_by_name(tmp_path: Path) -> None:
    """The new program lists them in another order: numbers change, names do not. Lists are kept, as LBFGS has them."""
    extra = {"old_dirs": [torch.ones(2), {"a": torch.zeros(3)}]}
    Saved(2, TWO, MOMENTS, groups=[["a", "c"], ["b"]], extra=extra).write(tmp_path)
    for rank, state in enumerate(resharded(tmp_path, 3, WANTED, [["c", "a"], ["b"]])):
        optimizer = state["optimizer"]
        assert [(g["lr"], g["params"]) for g in optimizer["param_groups"]] == [(0.1, [0, 1]), (0.05, [2])]
        for number, name in enumerate("cab"):
            found = optimizer["state"][number]
            assert found["note"] == f"of {name}"
            assert_same_bits(found["exp_avg"], cut(MOMENTS[name], WANTED[name][1], rank), name)
        ones, zeros = optimizer["state"]["ca".index("a")]["old_dirs"]
        assert ones.tolist() == [1.0] * 2 and zeros["a"].tolist() == [0.0] * 3


def test_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    Saved(2, TWO, MOMENTS, groups=[["a", "c"], ["b"]]).write(tmp_path)
    with pytest.raises(MismatchError, match="does not fit optimizer: it has 2 parameter groups, this optimizer has 1"):
        resharded(tmp_path, 3, WANTED, [["a", "b", "c"]])


def test_pipeline_stages_become_one(tmp_path: Path) -> None:
    """Tensors that only some ranks have, under a number of their own in each stage's optimizer."""
    first, second = numbers(4, 3), numbers(6, 3)
    stages = {"a": (first, layout([2], "S(0)", ranks=[0, 1])), "b": (second, layout([2], "S(0)", ranks=[2, 3]))}
    Saved(4, stages, {"a": first + 1, "b": second + 1}).write(tmp_path)
    (state,) = resharded(tmp_path, 1, {"a": ((4, 3), WHOLE), "b": ((6, 3), WHOLE)})
    for number, (name, tensor) in enumerate((("a", first), ("b", second))):
        assert_same_bits(state["model"][name], tensor)
        assert_same_bits(state["optimizer"]["state"][number]["exp_avg"], tensor + 1)


# --- what is not a tensor of the strategy ---


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_the_rest_comes_from_the_ranks_own_file_or_from_one_each(tmp_path: Path, old: int, new: int) -> None:
    tensor = numbers(12, 2)
    Saved(old, {"w": (tensor, layout([old], "S(0)"))}).write(tmp_path)
    for rank, state in enumerate(resharded(tmp_path, new, {"w": ((12, 2), layout([new], "S(0)"))})):
        base = rank % old
        assert state["lr_scheduler"] == {"last_epoch": 7, "rank": base}
        assert state["model"]["running"].item() == base, "buffers"
        assert state["progress"]["step"] == 7
        assert set(state) == {"model", "optimizer", "lr_scheduler", "rng", "progress", "gradient_order"}


# --- what does not fit ---


def refusal_of(root: Path, world_size: int, wanted: Mapping[str, tuple[Sequence[int], Layout]]) -> str:
    facts, _ = facts_of(read_entries(root))
    found = plan_resume(facts, World(world_size, target_of(world_size, wanted).strategy))
    assert isinstance(found, Refusal)
    return str(found)


def test_another_shape_and_another_model_are_refused_with_names(tmp_path: Path) -> None:
    Saved(2, TWO).write(tmp_path)
    wider = {**WANTED, "a": ((6, 4), layout([3], "S(0)"))}
    assert "it does not fit the program: model.a has shape [6, 2] there and [6, 4] here" in refusal_of(
        tmp_path, 3, wider
    )
    more = {**WANTED, "d": ((2,), layout([3], "R"))}
    assert "model.d" in refusal_of(tmp_path, 3, more)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_hole_is_never_filled_with_anything(tmp_path: Path, lost: int) -> None:
    """Neither by the planner, nor, should a file vanish after planning, while reading."""
    Saved(4, {"w": (numbers(8, 3), layout([4], "S(0)"))}).write(tmp_path)
    target = target_of(2, {"w": ((8, 3), layout([2], "S(0)"))})
    plan = plan_for(tmp_path, target)
    file = tmp_path / f"rank_{lost}" / "w-1_7.safetensors"
    file.unlink()
    with pytest.raises(FileNotFoundError):
        assemble_for(plan, lost // 2, target)
    assert f"no usable file of rank {lost}, which held it" in refusal_of(
        tmp_path, 2, {"w": ((8, 3), layout([2], "S(0)"))}
    )


# --- all ranks together, as a guard starts ---


def test_a_damaged_replica_costs_nothing(tmp_path: Path) -> None:
    old, new = layout([2, 2], "R", "S(0)"), layout([2], "S(1)")
    tensor = numbers(8, 3)
    Saved(4, {"w": (tensor, old)}).write(tmp_path, 5).write(tmp_path, 7)
    flip_bit_in_data(tmp_path / "rank_0/w-1_7.safetensors")
    (tmp_path / "rank_3/w-1_7.safetensors").unlink()
    target = {"w": ((8, 3), new)}
    for rank, found in enumerate(found_on(2, tmp_path, target=lambda rank: target_of(2, target, rank=rank))):
        assert_same_bits(found.checkpoint.state["model"]["w"], cut(tensor, new, rank))
        assert (found.checkpoint.info.step, found.plan.resharded, found.plan.exact) == (7, True, False)
    assert len(list((tmp_path / QUARANTINE).rglob("*.safetensors"))) == 1


def test_a_part_outside_of_the_directory_is_not_touched(tmp_path: Path) -> None:
    """Paths come from rank 0's message. Those that another node sees may be in a place of that node."""
    Saved(2, {"w": (numbers(8, 3), layout([2], "R"))}).write(tmp_path)
    flip_bit_in_data(tmp_path / "rank_1/w-1_7.safetensors")
    target = target_of(1, {"w": ((8, 3), WHOLE)})
    plan = plan_for(tmp_path, target)
    share = Share(plan, replace(plan.ranks[0], assembled=True), is_seen=True, sources=(), uses_own_state=False)
    reader = ShareReader([tmp_path / "rank_0"], 0, None, Trust())
    outside = plan.files[1][0].path
    assert reader.read(share, target.blueprint) == (
        None,
        [(outside, f"{outside} is outside of the checkpoint directory and is not touched")],
    )
    others = replace(plan, files={**plan.files, 1: (replace(plan.files[1][0], visible_to=frozenset({5})),)})
    found, problems = reader.read(share._replace(plan=others), target.blueprint)
    assert found is not None and not problems
    assert Path(outside).exists(), "damaged, and not put aside"


# --- what it costs ---


def test_only_what_has_a_wanted_part_is_read_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (64, 32_000)
    tensors = {"w": (numbers(*shape), layout([4], "S(0)")), "v": (numbers(64), layout([4], "S(0)"))}
    Saved(4, tensors).write(tmp_path)
    target = target_of(2, {"w": (shape, layout([2], "S(0)")), "v": ((64,), layout([2], "S(0)"))})
    plan = plan_for(tmp_path, target)
    (source,) = plan.source.by_name["model.w"]
    read: list[tuple[int, str]] = []

    def checked(fd: int, header: Header, entry: TensorEntry, path: Path, wanted: Any) -> None:
        read.append((header.info.rank, entry.name))
        read_checked(fd, header, entry, path, wanted)

    monkeypatch.setattr("mindx_elastic.start.reshard.read_checked", checked)
    with Parts(plan, plan.ranks[1]) as parts:
        second_half = parts.tensor(source, layout([2], "S(0)"), 1)
        parts.finish()
    assert_same_bits(second_half, cut(tensors["w"][0], layout([2], "S(0)"), 1))
    assert sorted(read) == [(2, "model.w"), (3, "model.w")]


def test_large_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads read them, also out of files that are closed for others meanwhile."""
    monkeypatch.setattr("mindx_elastic.start.reshard._MOST_OPEN", 2)
    shape = (60, 6400)  # in pieces of more than the 64 KB from which threads read
    tensors = {"w": numbers(*shape), "v": numbers(*shape).flip(0)}
    for old in (layout([4], "S(0)"), layout([2, 2], "R", "S(1)")):
        root = tmp_path / str(len(old.mesh_shape))
        Saved(4, {name: (tensor, old) for name, tensor in tensors.items()}).write(root)
        for new in (layout([3], "S(0)"), layout([2], "S(1)")):
            states = resharded(root, new.size, dict.fromkeys(tensors, (shape, new)))
            for name, tensor in tensors.items():
                same_for_all(states, name, tensor, new)


def test_a_large_part_that_is_cut_off_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Saved(2, {"w": (numbers(64, 32_000), layout([2], "S(0)"))}).write(tmp_path)
    target = target_of(1, {"w": ((64, 32_000), WHOLE)})
    plan = plan_for(tmp_path, target)
    (path,) = {fact.path for facts in plan.files.values() for fact in facts if fact.rank == 1}
    readers: list[str] = []

    def read(fd: int, *args: Any) -> None:
        if str(args[2]) == path:
            readers.append(threading.current_thread().name)
            os.truncate(path, 100_000)
        read_checked(fd, *args)

    monkeypatch.setattr("mindx_elastic.start.reshard.read_checked", read)
    with no_descriptor_left(), pytest.raises(CorruptCheckpointError, match="is cut off") as caught:
        assemble_for(plan, 0, target)
    assert str(caught.value.path) == path
    assert len(readers) == 1 and readers[0].startswith("mindx-persist-read"), readers
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mindx-persist-read")]
