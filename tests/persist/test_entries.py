"""What is written of tensors comes back, and nothing else is taken for it."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.persist.dtypes import NAMES
from mindx_elastic.persist.entries import entries_of_text, entry_texts, place_tensors

NAME = st.text(st.characters(codec="utf-8"), max_size=6)
SHAPE = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(NAME, st.tuples(SHAPE, st.sampled_from(list(NAMES))), max_size=6)


def made(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}


def text_of(tensors: dict[str, Any]) -> str:
    """As it is in a header, behind the metadata."""
    return "".join(f",{text}" for text in entry_texts(place_tensors(made(tensors)))) + "}   "


@given(TENSORS)
def test_what_is_written_comes_back(tensors: dict[str, Any]) -> None:
    assert list(entries_of_text(text_of(tensors)).values()) == place_tensors(made(tensors))


@given(TENSORS, st.randoms(use_true_random=False))
def test_a_damaged_text_is_refused_or_sound(tensors: dict[str, Any], chance: random.Random) -> None:
    text = text_of(tensors)
    for _ in range(20):
        place = chance.randrange(len(text) + 1)
        what = chance.choice(["", *'0129,:"{}[]-. \\', '"F32"', "null", ',"a":1', text[place : place + 30]])
        damaged = text[:place] + what + text[place + chance.choice([0, 1, 1, 3]) :]
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            found = list(entries_of_text(damaged).values())
            assert all(one.end == other.start for one, other in pairwise(found))
            assert all(torch.Size(e.shape).numel() * e.torch_dtype.itemsize == e.nbytes for e in found)
