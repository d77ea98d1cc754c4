"""FSDP modules after an error in a forward or backward: ready for the next one, without the gradients of the last."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from mindx_elastic.rejoin import sharded

pytestmark = pytest.mark.usefixtures("one_rank_group")
CAN_RESET = hasattr(FSDPModule, "reset_iter_state")
needs_reset = pytest.mark.skipif(not CAN_RESET, reason="before torch 2.13 FSDP cannot be taken up again: a restart")


def build() -> Any:
    torch.manual_seed(1)
    network = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    mesh = init_device_mesh("cpu", (1,))
    for block in network:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def step(network: nn.Module) -> list[torch.Tensor]:
    """The gradients of one step."""
    network(torch.ones(2, 6)).sum().backward()
    found = [parameter.grad.to_local().clone() for parameter in network.parameters()]  # type: ignore[union-attr]
    network.zero_grad()
    return found


class Cut(RuntimeError):
    pass


def cut_off(*_: Any) -> None:
    raise Cut


@needs_reset
@pytest.mark.parametrize("where", ["forward", "backward", "before the reduction"])
def test_a_step_after_one_that_was_cut_off_has_its_own_gradients(where: str) -> None:
    expected = step(build())
    network: Any = build()
    step(network)  # torch makes up its mind in the first one
    if where == "forward":
        handle: Any = network[1][0].register_forward_hook(cut_off)
    elif where == "backward":
        handle = network[1][0].register_full_backward_hook(cut_off)
    else:  # the parameters of the last block have gradients that are not reduced yet
        handle = network[2][0].register_full_backward_pre_hook(cut_off)
        group = network[2]._get_fsdp_state()._fsdp_param_groups[0]
        group.unshard()
        group.wait_for_unshard()
        for parameter in group.fsdp_params:
            parameter.unsharded_param.grad = torch.full_like(parameter.unsharded_param, 7.0)
    with pytest.raises(Cut):
        step(network)
    handle.remove()
    assert sharded.reset([network]) == ""
    for mine, theirs in zip(step(network), expected, strict=True):
        assert torch.equal(mine, theirs)


@needs_reset
def test_modules_that_have_not_run_yet_can_be_reset() -> None:
    network = build()
    assert sharded.reset([network, nn.Linear(2, 2)]) == ""
    assert all(torch.equal(a, b) for a, b in zip(step(network), step(build()), strict=True))


def test_what_cannot_be_taken_up_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build()
    if CAN_RESET:
        assert sharded.problem([network, nn.Linear(2, 2)]) == ""
        monkeypatch.delattr(FSDPModule, "reset_iter_state")
    assert re.search("FSDP of this torch .* lacks .*reset_iter_state", sharded.problem([network]))
    assert sharded.problem([nn.Linear(2, 2)]) == ""
