"""Arguments of a call: described as JSON, and made again with the same looks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mindx_elastic.capture.call_arguments import UnknownArgumentError, describe_arguments, make_arguments, sizes_in


def again(*arguments: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return make_arguments(json.loads(json.dumps(describe_arguments(arguments, named))))


def test_plain_values_and_containers_come_back() -> None:
    positional, named = again(1, 2.5, None, "a", True, [1, (2, "b")], {"k": [None]}, torch.float16, depth=3)
    assert positional == (1, 2.5, None, "a", True, [1, (2, "b")], {"k": [None]}, torch.float16)
    assert named == {"depth": 3} and type(positional[5][1]) is tuple


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).t(),
        torch.zeros(1, 4).expand(5, 4),
        torch.zeros(0, 4),
        torch.zeros(()),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, 2, dtype=torch.complex64),
        torch.zeros(6)[1::2],
    ],
)
def test_a_tensor_has_the_same_sizes_strides_and_type(tensor: torch.Tensor) -> None:
    ((made,), _) = again(tensor)
    assert made.shape == tensor.shape and made.stride() == tensor.stride() and made.dtype == tensor.dtype
    assert not made.requires_grad and not made._is_view()


def test_small_whole_numbers_keep_their_values_and_large_tensors_are_valid() -> None:
    lengths, mask, tokens = torch.tensor([3, 1, 2]), torch.tensor([True, False]), torch.randint(5, 9, (40, 40))
    (made, made_mask, made_tokens, noise), _ = again(lengths, mask, tokens, torch.randn(40, 40))
    assert torch.equal(made, lengths) and torch.equal(made_mask, mask)
    assert not made_tokens.any()
    assert noise.min() > 0 and noise.max() < 1 and noise.std() > 0


def test_gradients_and_shared_memory() -> None:
    leaf = torch.zeros(4, requires_grad=True)
    inner = leaf * 2
    tokens = torch.arange(2000).reshape(2, 1000)
    (made_leaf, made_inner, x, y, same), _ = again(leaf, inner, tokens[:, :-1], tokens[:, 1:], leaf)
    assert made_leaf.is_leaf and made_leaf.requires_grad and same is made_leaf
    assert made_inner.requires_grad and not made_inner.is_leaf
    assert y.data_ptr() - x.data_ptr() == 8 and x.stride() == (1000, 1)


def test_marks_of_dynamic_sizes() -> None:
    tensor = torch.zeros(6, 5, 4)
    torch._dynamo.mark_dynamic(tensor, 0, min=2, max=64)
    torch._dynamo.maybe_mark_dynamic(tensor, 1)
    torch._dynamo.mark_static(tensor, 2)
    ((made,), _) = again(tensor)
    for name in ("_dynamo_dynamic_indices", "_dynamo_dynamic_range", "_dynamo_weak_dynamic_indices"):
        assert getattr(made, name) == getattr(tensor, name), name
    assert made._dynamo_static_indices == {2}


def test_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    again(torch.zeros(40, 40))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.eye(2).to_sparse(), torch.zeros(2, device="meta"), len])
def test_what_cannot_be_made_again_is_said(value: Any) -> None:
    with pytest.raises(UnknownArgumentError):
        describe_arguments((value,), {})


def test_sizes_of_all_tensors() -> None:
    assert sizes_in(([torch.zeros(2, 3)], {"a": (torch.zeros(4), 5)})) == [[2, 3], [4]]
