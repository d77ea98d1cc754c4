"""The raw states of Python's and numpy's generators are those that the libraries give, whatever was drawn before."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    have_moved,
    numpy_state,
    put_back_numpy,
    put_back_python,
    python_state,
    torch_state,
)


@dataclass(frozen=True)
class Library:
    """One library's global generator: what moves it, what it says of itself, and our way around it."""

    moves: dict[str, Callable[[], object]]
    draw: Callable[[], list[Any]]
    says: Callable[[], Any]
    state: Callable[..., Any]
    put_back: Callable[[Any], None]
    as_said: Callable[[Any], Any]
    kind: type


def numpy_says() -> dict[str, Any]:
    return dict(np.random.get_state(legacy=False))


PYTHON = Library(
    {
        "random": random.random,
        "gauss": lambda: random.gauss(0, 1),  # makes two and keeps one
        "many": lambda: random.getrandbits(32 * 624),  # all words anew
        "seed": lambda: random.seed(5),
        "setstate with gauss": lambda: random.setstate((*random.Random(7).getstate()[:2], 0.25)),
    },
    lambda: [random.gauss(0, 1), random.random(), random.getrandbits(900)],
    random.getstate,
    python_state,
    put_back_python,
    PythonState.as_tuple,
    PythonState,
)
NUMPY = Library(
    {
        "rand": lambda: np.random.rand(3),
        "randn": np.random.randn,  # makes two and keeps one
        "many": lambda: np.random.rand(400),
        "half a word": lambda: np.random.randint(0, 2, dtype=np.uint8),
        "seed": lambda: np.random.seed(5),
        "set_state with gauss": lambda: np.random.set_state(
            {**np.random.RandomState(8).get_state(legacy=False), "has_gauss": 1, "gauss": 0.25}
        ),
    },
    lambda: [np.random.randn(), np.random.rand(), np.random.bytes(70)],
    lambda: repr(numpy_says()),
    numpy_state,
    put_back_numpy,
    lambda state: repr(state.as_dict()),
    NumpyState,
)


@pytest.fixture(autouse=True)
def _keep_the_generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


@pytest.mark.parametrize("library", [PYTHON, NUMPY], ids=["python", "numpy"])
@settings(deadline=None)
@given(data=st.data())
def test_a_state_is_the_librarys_after_any_mixture_and_comes_back(library: Library, data: st.DataObject) -> None:
    for name in data.draw(st.lists(st.sampled_from(sorted(library.moves)), max_size=12)):
        library.moves[name]()
    expected, state = library.says(), library.state()
    assert isinstance(state, library.kind), "the fast way is used here"
    assert library.as_said(state) == expected
    assert library.state(state) is state
    assert library.kind.from_bytes(state.to_bytes()) == state  # type: ignore[attr-defined]
    coming = library.draw()
    for name in data.draw(st.lists(st.sampled_from(sorted(library.moves)), max_size=3)):
        library.moves[name]()
    now = library.state(state)
    assert library.as_said(now) == library.says()
    assert (now is state) is (library.says() == expected)
    library.put_back(state)
    assert library.says() == expected and library.state() == state
    assert library.draw() == coming
    assert library.state() != state


def test_another_bit_generator_of_numpy() -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    usual = numpy_state()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined]
        state = numpy_state()
        assert isinstance(state, dict)
        assert have_moved(python_state(), usual, torch_state())
        expected = np.random.rand(5).tolist()
        put_back_numpy(state)
        assert np.random.rand(5).tolist() == expected
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]
    assert numpy_state() == usual


def test_where_the_memory_is_not_as_expected_the_libraries_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mersenne, "_live_python", lambda: None)
    monkeypatch.setattr(mersenne, "_gauss_offset", lambda: None)
    monkeypatch.setattr(mersenne, "_numpy", None)
    PYTHON.draw(), NUMPY.draw()
    python, numpy = python_state(), numpy_state()
    assert python == random.getstate() and repr(numpy) == repr(numpy_says())
    expected = PYTHON.draw(), NUMPY.draw()
    put_back_python(python)
    put_back_numpy(numpy)
    assert (PYTHON.draw(), NUMPY.draw()) == expected


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


def test_another_layout_of_torchs_generator_is_found_out() -> None:
    """The normal deviate that is kept back is elsewhere."""
    code = """
import ctypes
from mindx_elastic.core import mersenne
mersenne._RawTorch = ctypes.c_char * 2516
print(mersenne._torch_block())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["None"]


def test_torchs_generator_is_found_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert mersenne._torch_block.__wrapped__() is not None


@pytest.mark.parametrize("as_expected", [True, False])
def test_torchs_state_is_what_torch_says_after_any_draw(as_expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same tensor as long as nothing is drawn."""
    if not as_expected:
        monkeypatch.setattr(mersenne, "_torch_block", lambda: None)
    kept = torch.default_generator.get_state()
    draws: list[Callable[[], object]] = [
        lambda: torch.randn(1),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.rand(700),
        lambda: torch.manual_seed(7),
        lambda: torch.default_generator.set_state(kept),
    ]
    try:
        for draw in draws * 20:
            draw()
            state = mersenne.torch_state()
            assert torch.equal(state, torch.default_generator.get_state())
            assert mersenne.torch_state() is state
            before = state.clone()
            torch.rand(1)
            assert torch.equal(state, before), "no memory of the generator's"
    finally:
        torch.default_generator.set_state(kept)
