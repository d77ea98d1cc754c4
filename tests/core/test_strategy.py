from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import REPLICATE, Layout, Shard
from mindx_elastic.core.strategy import LayoutRecord, Strategy, TensorSpec, merge_specs
from mindx_elastic.errors import UsageError
from tests.start.strategies import layout_of

DDP = layout_of((4,), "R")
HSDP = layout_of((2, 2), "R", "S(0)")
FSDP_TP = layout_of((2, 2), "_S(0,2)", "S(0)")


def spec(name: str, shape: tuple[int, ...], layout: Layout, dtype: str = "F32", parameter: str = "") -> TensorSpec:
    return TensorSpec(name, shape, layout, dtype, parameter)


def test_the_same_description_from_several_files_counts_once() -> None:
    again = layout_of((4,), "R", ranks=[0, 1, 2, 3])
    assert merge_specs([spec("w", (8,), DDP), spec("b", (2,), HSDP), spec("w", (8,), again)]) == [
        spec("w", (8,), DDP),
        spec("b", (2,), HSDP),
    ]


def test_contradictory_descriptions_are_refused_and_named() -> None:
    overlapping = layout_of((2,), "R", ranks=(3, 7))
    for other in (spec("w", (9,), DDP), spec("w", (8,), HSDP), spec("w", (8,), overlapping)):
        with pytest.raises(UsageError, match=r"contradictory descriptions of w: .*\[8\]"):
            Strategy(8, (spec("w", (8,), DDP), other))


def test_a_layout_that_splits_a_dimension_which_the_tensor_does_not_have_is_refused_and_named() -> None:
    with pytest.raises(UsageError, match=r"bias of shape \[8\] .* no dimension 1"):
        Strategy(4, (spec("bias", (8,), layout_of((4,), "S(1)")),))


def test_a_tensor_that_is_split_and_has_no_shape_is_one_whose_shape_is_not_known() -> None:
    unknown = spec("w", (), HSDP)  # MindSpore's strategy files do not tell
    assert not unknown.is_shape_known
    assert not Strategy(4, (unknown,)).classes[0].is_empty(1)
    assert spec("w", (), DDP).is_shape_known  # a scalar


def test_a_shard_is_empty_when_no_tensor_of_its_class_has_an_element_in_it() -> None:
    quarter = layout_of((4,), "S(0)")
    (group,) = Strategy(4, (spec("a", (1,), quarter), spec("b", (3,), quarter))).classes
    assert [group.is_empty(shard) for shard in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("layouts", "groups"),
    [
        ([DDP], [(0, 1, 2, 3)]),
        ([HSDP], [(0, 2), (1, 3)]),
        ([DDP, HSDP], [(0, 2), (1, 3)]),
        ([layout_of((2, 2), "S(0)", "R")], [(0, 1), (2, 3)]),
        ([HSDP, layout_of((2, 2), "S(0)", "R")], [(0,), (1,), (2,), (3,)]),
        ([FSDP_TP], [(0,), (1,), (2,), (3,)]),
        ([DDP, layout_of((1,), "R", ranks=(2,))], [(0, 1, 3), (2,)]),  # ZeRO-1
        ([layout_of((2,), "R", ranks=(0, 1)), layout_of((2,), "R", ranks=(2, 3))], [(0, 1), (2, 3)]),  # stages
    ],
)
def test_replica_groups_are_the_ranks_that_hold_the_same_of_everything(
    layouts: list[Layout], groups: list[tuple[int, ...]]
) -> None:
    strategy = Strategy(4, tuple(spec(f"t{i}", (8,), layout) for i, layout in enumerate(layouts)))
    assert strategy.replica_groups() == groups


STRATEGY = Strategy(
    8,
    (
        spec("w", (9, 4), FSDP_TP, "BF16"),
        spec("o.w.exp_avg", (9, 4), FSDP_TP, "F32", "w"),
        spec("scale", (), DDP, ""),
        spec("late", (5,), layout_of((2,), "S(0)", ranks=(7, 4)), "I64"),
    ),
)


def test_a_strategy_survives_json() -> None:
    assert Strategy.from_json(json.loads(json.dumps(STRATEGY.to_json()))) == STRATEGY


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path] if path else []
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return found + [place for key, value in items for place in places(value, (*path, key))]


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    content = copy.deepcopy(content)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return content


hostile: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1 << 31, 1 << 62, 1 << 70, 0.5, float("nan"), "", "R", "x" * 50, [], {}, [[0, 1 << 60]], [[]]]
)


def record(**change: Any) -> dict[str, Any]:
    """Rank 1 of 4: `w` of 9 rows over FSDP2 around TP, `loss` replicated, the optimizer's state by number."""
    content = {
        "rank": 1,
        "world_size": 4,
        "layouts": [DDP.to_json(), FSDP_TP.to_json()],
        "tensors": {"model.w": [1, [9, 4]], "optimizer.state.1.exp_avg": [1, [9, 4]]},
        "parameters": {"optimizer": ["model.b", "model.w"]},
    }
    return {**content, **change}


TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.w": ("F32", (2, 4)),
    "optimizer.state.1.exp_avg": ("F32", (2, 4)),
    "rng.torch": ("U8", (5056,)),
}


def test_a_record_gives_the_strategy_as_the_file_knows_it() -> None:
    # Rank 1 holds rows 5 and 6 of 9: tp takes 5 and 4 rows, dp half of these.
    strategy = LayoutRecord.from_json(record()).strategy(TENSORS)
    assert strategy.world_size == 4
    assert [(s.name, s.shape, s.parameter) for s in strategy.tensors] == [
        ("model.w", (9, 4), ""),
        ("optimizer.state.model.w.exp_avg", (9, 4), "model.w"),
    ]
    assert all(each.layout == FSDP_TP and each.dtype == "F32" for each in strategy.tensors)


def test_a_tensor_that_is_not_the_part_which_the_record_promises_is_named() -> None:
    for local in ((3, 4), (2,), ()):
        with pytest.raises(UsageError, match=r"model\.w has shape .*, which is not rank 1's part of \[9, 4\]"):
            LayoutRecord.from_json(record()).strategy({**TENSORS, "model.w": ("F32", local)})


def as_strategy(content: Any) -> Strategy:
    strategy = Strategy.from_json(content)
    assert Strategy.from_json(strategy.to_json()) == strategy
    return strategy


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (STRATEGY.to_json(), as_strategy),
        (record(default=0), lambda content: LayoutRecord.from_json(content).strategy(TENSORS)),
    ],
    ids=["strategy", "record"],
)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_hostile_value_anywhere_gives_a_strategy_or_a_named_error(content: Any, read: Any, data: Any) -> None:
    place = data.draw(st.sampled_from(places(content)))
    with contextlib.suppress(UsageError):
        assert all(
            group.is_empty(0) in (True, False) for group in read(changed(content, place, data.draw(hostile))).classes
        )


def test_markers_of_single_ranks_and_a_split_one_are_the_same() -> None:
    """Files of version 0.1 list every rank that has its own part of an optimizer; later ones say it in one entry."""
    single = [TensorSpec("@optimizer.state", (), Layout((1,), (REPLICATE,), (rank,))) for rank in range(4)]
    split = TensorSpec("@optimizer.state", (4,), Layout((4,), (Shard(0),)))
    for markers in (single, [split], [*single, split], [split, single[2]]):
        (marker,) = Strategy(4, tuple(markers)).tensors
        assert marker == split
        assert marker.layout.holders == split.layout.holders
