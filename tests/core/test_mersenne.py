"""The raw states of Python's and numpy's generators are those that the libraries give, whatever was drawn before."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core import mersenne
from mindx_elastic.core.mersenne import (
    NumpyState,
    PythonState,
    numpy_state,
    put_back_numpy,
    put_back_python,
    python_state,
)

PYTHON: dict[str, Callable[[], object]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),  # makes two and keeps one
    "normalvariate": lambda: random.normalvariate(0, 1),
    "bits": lambda: random.getrandbits(70),
    "many": lambda: random.getrandbits(32 * 624),  # all words anew
    "shuffle": lambda: random.shuffle(list(range(20))),
    "seed": lambda: random.seed(5),
    "seed again": lambda: random.seed("text"),
    "setstate": lambda: random.setstate(random.Random(7).getstate()),
    "setstate with gauss": lambda: random.setstate((*random.getstate()[:2], 0.25)),
}
NUMPY: dict[str, Callable[[], object]] = {
    "rand": lambda: np.random.rand(3),
    "randn": np.random.randn,  # makes two and keeps one
    "randn twice": lambda: np.random.randn(2),
    "legacy gauss": lambda: np.random.normal(1.0, 2.0),
    "bytes": lambda: np.random.bytes(3),
    "many": lambda: np.random.rand(400),
    "shuffle": lambda: np.random.shuffle(list(range(20))),
    "half a word": lambda: np.random.randint(0, 2, dtype=np.uint8),
    "seed": lambda: np.random.seed(5),
    "set_state": lambda: np.random.set_state(np.random.RandomState(7).get_state()),
    "set_state with gauss": lambda: np.random.set_state(
        {**np.random.RandomState(8).get_state(legacy=False), "has_gauss": 1, "gauss": 0.25}
    ),
}


@pytest.fixture(autouse=True)
def _keep_the_generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def numpy_says() -> dict[str, Any]:
    return dict(np.random.get_state(legacy=False))


def as_dict(state: NumpyState | dict[str, Any]) -> dict[str, Any]:
    return state.as_dict() if isinstance(state, NumpyState) else state


def test_the_fast_ways_are_used_here() -> None:
    """Otherwise the other tests would prove nothing."""
    assert isinstance(python_state(), PythonState)
    assert isinstance(numpy_state(), NumpyState)


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(PYTHON)), max_size=12), st.lists(st.sampled_from(sorted(PYTHON)), max_size=3))
def test_python_after_any_mixture(before: list[str], after: list[str]) -> None:
    for name in before:
        PYTHON[name]()
    expected, state = random.getstate(), python_state()
    assert isinstance(state, PythonState)
    assert state.as_tuple() == expected
    coming = [random.gauss(0, 1), random.random(), random.getrandbits(900)]
    for name in after:
        PYTHON[name]()
    put_back_python(state)
    assert random.getstate() == expected
    assert python_state() == state
    assert [random.gauss(0, 1), random.random(), random.getrandbits(900)] == coming
    assert python_state() != state


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(NUMPY)), max_size=12), st.lists(st.sampled_from(sorted(NUMPY)), max_size=3))
def test_numpy_after_any_mixture(before: list[str], after: list[str]) -> None:
    for name in before:
        NUMPY[name]()
    expected, state = numpy_says(), numpy_state()
    assert isinstance(state, NumpyState)
    assert repr(state.as_dict()) == repr(expected)
    coming = [np.random.randn(), np.random.rand(), np.random.bytes(70)]
    for name in after:
        NUMPY[name]()
    put_back_numpy(state)
    assert repr(numpy_says()) == repr(expected)
    assert numpy_state() == state
    assert [np.random.randn(), np.random.rand(), np.random.bytes(70)] == coming
    assert numpy_state() != state


class Own(random.Random):
    """A generator of the program's with more state than the words."""

    def __init__(self) -> None:
        self.extra = 1
        super().__init__(3)

    def getstate(self) -> Any:
        return self.extra, super().getstate()

    def setstate(self, state: Any) -> None:
        self.extra, inner = state
        super().setstate(inner)


@pytest.mark.parametrize("own", [Own(), random.Random(4)])
def test_another_generator_behind_the_functions(own: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = python_state()
    for name in ("getstate", "setstate", "random"):
        monkeypatch.setattr(random, name, getattr(own, name))
    state, expected = python_state(), own.getstate()
    assert (state.as_tuple() if isinstance(state, PythonState) else state) == expected
    assert isinstance(state, PythonState) is (type(own) is random.Random)
    random.random()
    put_back_python(state)
    assert own.getstate() == expected
    monkeypatch.undo()
    assert python_state() == usual, "and the first one has not moved"


def test_another_bit_generator_of_numpy() -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    usual = numpy_state()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined]
        np.random.rand()
        state = numpy_state()
        assert isinstance(state, dict)
        expected = np.random.rand(5).tolist()
        put_back_numpy(state)
        assert np.random.rand(5).tolist() == expected
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]
    assert np.array_equal(as_dict(numpy_state())["state"]["key"], as_dict(usual)["state"]["key"])


def test_where_the_memory_is_not_as_expected_the_libraries_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mersenne, "_python_is_as_expected", lambda: False)
    monkeypatch.setattr(mersenne, "_gauss_offset", lambda: None)
    monkeypatch.setattr(mersenne, "_python", mersenne._PythonAccess(None))
    monkeypatch.setattr(mersenne, "_numpy", None)
    random.gauss(0, 1)
    np.random.randn()
    python, numpy = python_state(), numpy_state()
    assert python == random.getstate()
    assert repr(numpy) == repr(numpy_says())
    expected = random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()
    put_back_python(python)
    put_back_numpy(numpy)
    assert (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()) == expected


@pytest.mark.parametrize("damage", ["16", "24"])
def test_another_layout_of_the_interpreter_is_found_out(damage: str) -> None:
    """The words are looked for a few bytes off, as if this interpreter had other objects."""
    code = f"""
import ctypes, random
from mindx_elastic.core import mersenne
plain = mersenne._python_block
mersenne._python_block = lambda g: mersenne._RawTwister.from_address(id(g) + object.__basicsize__ + {damage} - 20)
print(mersenne._python_is_as_expected(), type(mersenne.python_state()).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "tuple"]


@settings(deadline=None)
@given(st.sampled_from(sorted(PYTHON)), st.sampled_from(sorted(NUMPY)))
def test_an_earlier_state_is_taken_over_only_where_it_is_equal(python_move: str, numpy_move: str) -> None:
    python, numpy = python_state(), numpy_state()
    assert python_state(python) is python
    assert numpy_state(numpy) is numpy
    PYTHON[python_move]()
    NUMPY[numpy_move]()
    now, then = python_state(python), python
    assert isinstance(now, PythonState)
    assert isinstance(then, PythonState)
    assert now.as_tuple() == random.getstate()
    assert (now is then) is (now.as_tuple() == then.as_tuple())
    assert repr(as_dict(numpy_state(numpy))) == repr(numpy_says())


# --- torch's ---


def test_torchs_state_is_what_torch_says_after_any_draw() -> None:
    """And the same tensor as long as nothing is drawn."""
    kept = torch.default_generator.get_state()
    draws: list[Callable[[], object]] = [
        lambda: torch.randn(1),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.rand(700),
        lambda: torch.randint(5, (1,)),
        lambda: torch.manual_seed(7),
        lambda: torch.default_generator.set_state(kept),
        lambda: torch.empty(3).bernoulli_(0.5),
        lambda: torch.nn.functional.dropout(torch.ones(3)),
        lambda: torch.multinomial(torch.ones(4), 2),
    ]
    try:
        for draw in [draw for _ in range(20) for draw in draws]:
            draw()
            state = mersenne.torch_state()
            assert torch.equal(state, torch.default_generator.get_state())
            assert mersenne.torch_state() is state
            before = state.clone()
            torch.rand(1)
            assert torch.equal(state, before), "no memory of the generator's"
    finally:
        torch.default_generator.set_state(kept)
