"""A form that is known gives the text and the tensors that `flatten` gives, or says that the state has another one."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.format import tree_text
from mindx_elastic.persist.known_form import KnownForm, OtherFormError
from tests.persist.states import assert_same
from tests.persist.test_packer import TREES


def _form(state: Any) -> KnownForm | None:
    try:
        return KnownForm(state)
    except OtherFormError:
        return None


def _check(form: KnownForm | None, state: Any) -> bool:
    """Whether `state` has the form; then what it gives is compared."""
    if form is None:
        return False
    try:
        text, tensors = form.fill(state)
    except OtherFormError:
        return False
    tree, expected = flatten(state)
    assert text == tree_text(tree)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].data_ptr() == tensor.data_ptr() and tensors[name].stride() == tensor.stride()
        assert_same(tensors[name].detach(), tensor)
    return True


@settings(max_examples=60, deadline=None)
@given(st.lists(TREES, min_size=1, max_size=4))
def test_any_states(states: list[Any]) -> None:
    for form in map(_form, states):
        for state in states:
            _check(form, {"a": state})
            _check(form, state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.5, math.nan),
        (0.5, -math.inf),
        (1, 1 << 63),
        (1, 1 << 2000),
        ("a", "b"),
        (None, 0),
        (b"a", b"b"),
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: 0}, {True: 0}),
        ({"a": 1}, OrderedDict(a=1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(4)[::2]),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.zeros(2), nn.Parameter(torch.zeros(2))),
        (torch.zeros(2), torch.zeros(2).to_sparse()),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (torch.zeros(2), torch._neg_view(torch.zeros(2))),
        (np.zeros(2), np.zeros(2, dtype=">f8")),
        (np.zeros((2, 2)), np.zeros((2, 2), order="F")),
        (np.zeros(2), np.zeros(2)[::-1]),
        (np.zeros(2), np.zeros(2, dtype="U1")),
    ],
    ids=str,
)
def test_a_state_that_only_looks_the_same(one: Any, other: Any) -> None:
    for nested in (lambda value: {"v": value}, lambda value: {"k": [1, value, (2.5, "s")], 3: torch.ones(1)}):
        form = _form(nested(one))
        assert _check(form, nested(one))
        assert not _check(form, nested(other))


def test_other_numbers_and_other_bytes_are_the_same_form() -> None:
    def state(number: int) -> Any:
        rates = {"lr": 0.1 * number, "betas": (0.9, -0.0), "params": [0, 1], "none": None, "text": "\u20630\u2063 'x'"}
        moments = {0: {"step": torch.tensor(float(number)), "average": torch.full((3,), number)}}
        return {"state": moments, "groups": [rates], "keys": np.arange(number, number + 4), "steps": -number}

    form = KnownForm(state(1))
    for number in (1, 2, 7):
        assert _check(form, state(number))


def test_tensors_that_share_memory_are_left_to_flatten() -> None:
    tied = torch.zeros(2)
    assert _form({"a": tied, "b": tied}) is None
    form = _form({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert form is not None and not _check(form, {"a": tied, "b": tied})


def test_a_text_that_looks_like_the_place_of_a_number() -> None:
    assert _form({"a": 1, "b": "\u20630\u2063"}) is None
