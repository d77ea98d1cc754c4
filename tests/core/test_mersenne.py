"""The states of Python's and numpy's generators are those that the libraries give, whatever was drawn before."""

from __future__ import annotations

import random
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
    bytes_of_python,
    numpy_state,
    put_back_numpy,
    python_of_bytes,
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


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(PYTHON)), max_size=12), st.sampled_from(sorted(PYTHON)))
def test_python_after_any_mixture(before: list[str], move: str) -> None:
    for name in before:
        PYTHON[name]()
    state = python_state()
    packed = bytes_of_python(state)
    assert packed is not None and python_of_bytes(packed) == state == random.getstate()
    assert python_state(state) is state
    PYTHON[move]()
    now = python_state(state)
    assert now == random.getstate() and (now is state) is (now == state)


def test_states_that_are_not_of_a_plain_generator_have_no_bytes() -> None:
    version, words, gauss = random.getstate()
    for state in ((1, (version, words, gauss)), (2, words, gauss), (version, words[:-1], gauss), (version, words, "x")):
        assert bytes_of_python(state) is None
    with pytest.raises(ValueError, match="12 bytes"):
        python_of_bytes(bytes(12))


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


def test_where_the_memory_is_not_as_expected_numpy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mersenne, "_gauss_offset", lambda: None)
    monkeypatch.setattr(mersenne, "_numpy", None)
    np.random.randn()
    state = numpy_state()
    assert repr(state) == repr(numpy_says())
    expected = np.random.randn(), np.random.rand()
    put_back_numpy(state)
    assert (np.random.randn(), np.random.rand()) == expected


@settings(deadline=None)
@given(st.sampled_from(sorted(NUMPY)))
def test_an_earlier_state_is_taken_over_only_where_it_is_equal(move: str) -> None:
    state = numpy_state()
    assert numpy_state(state) is state
    NUMPY[move]()
    assert repr(as_dict(numpy_state(state))) == repr(numpy_says())


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
