"""The program's own variables: which are noted, under which names, and which of them explain a difference."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mindx_elastic.guard.variables import own_variables
from mindx_elastic.prove.causes import explain
from mindx_elastic.prove.compare import Reference, compare_life
from mindx_elastic.prove.records import Life, Step

PLACE = "found_in() in test_variables.py"
REPLAY = [1, 2]


class Stopping:
    best = 9.0  # until an instance has its own

    def __init__(self) -> None:
        self.bad = 0

    @property
    def never(self) -> int:
        raise AssertionError("code of the program ran")


class Counting(Dataset[int]):
    calls = 0

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 3


def found_in(*kept: object) -> dict[str, str]:
    stopping, names, table, mean = Stopping(), {"x": 1, "y": [2.5]}, np.zeros(3), torch.ones(2)  # noqa: F841
    loader, huge, model, window = DataLoader(Counting()), torch.zeros(1 << 20), torch.nn.Linear(2, 2), deque([5])  # noqa: F841
    return own_variables(sys._getframe(), set(map(id, kept)))


def test_plain_values_are_found_by_their_names() -> None:
    found = found_in()
    expected = {"stopping.bad": "0", "stopping.best": "9.0", "names['x']": "1", "names['y'][0]": "2.5",
                "loader.dataset.calls": "0"}  # fmt: skip
    assert {name: found.get(f'"{name}" ({PLACE})') for name in expected} == expected
    assert found['the length of "REPLAY" (test_variables.py)'] == "2"
    assert found[f'the length of "window" ({PLACE})'] == "1"
    assert len(found[f'"mean" ({PLACE})']) == len(found[f'"table" ({PLACE})']) == 16
    assert not [name for name in found if name.startswith(('"huge', '"model', '"found_in', '"__'))]


def test_what_the_guard_keeps_is_left_out() -> None:
    assert '"REPLAY[0]" (test_variables.py)' in found_in()
    assert not [name for name in found_in(REPLAY) if "REPLAY" in name]


def test_a_number_is_found_though_the_guard_keeps_an_equal_one() -> None:
    assert f'"stopping.bad" ({PLACE})' in found_in(0)


def step(number: int, **ends: str) -> Step:
    end = {"weights|w": str(number), "variable|passed": str(number), "variable|clock": "1.5"}
    given = {"weights|w": str(number - 1)}
    return Step(series=0, number=number, epoch=1, step_in_epoch=number, given=given, end={**end, **ends})


def reference() -> Reference:
    lives = [Life(rank=0, series=0, steps=[step(n) for n in (1, 2, 3)], outcome="finished")]
    return Reference(lives=lives, varying=frozenset({"variable|clock"}))


def variables_of(resumed: Step, **entered: str) -> str:
    life = Life(rank=0, series=0, resumed=2, entered={"weights|w": "2", **entered}, steps=[resumed])
    known = reference()
    found = compare_life(known, life)
    assert found is not None
    return explain(known, found, lambda stream, before, after: None).variables


def test_a_variable_that_was_another_one_at_the_entry_is_named() -> None:
    lost = {"variable|passed": "0", "variable|clock": "7.5"}
    assert variables_of(step(3, **{"weights|w": "x"}), **lost) == "passed: 2, and 0 in the resumed run"


def test_a_count_that_the_loop_begins_is_named() -> None:
    other = step(3, **{"weights|w": "x", "variable|passed": "1"})
    assert variables_of(other) == "passed: 3, and 1 in the resumed run"
    assert variables_of(other, **{"variable|passed": "2"}) == "", "it was there, and right"


def test_other_variables_are_no_difference() -> None:
    life = Life(rank=0, series=0, resumed=2, entered={"weights|w": "2", "variable|passed": "0"}, outcome="finished")
    life.steps.append(replace(step(3), end={**step(3).end, "variable|passed": "1"}))
    assert compare_life(reference(), life) is None


def test_an_update_that_only_one_run_has_made() -> None:
    life = Life(rank=0, series=0, resumed=2, entered={"weights|w": "2"}, steps=[step(3, **{"weights|w": "2"})])
    found = compare_life(reference(), life)
    assert found is not None
    told = explain(reference(), found, lambda stream, before, after: None)
    assert "the uninterrupted run has updated them in this step, and the other one has not" in told.what
    assert "optimizer.step()" in told.cause and "guard.enumerate(loader)" in told.remedy
