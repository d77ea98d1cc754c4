"""What is done to a survivor's groups and DDP modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from mindx_elastic.rejoin.groups import connect, reset_ddp


def ddp(**fields: Any) -> Any:
    resets: list[str] = []
    return SimpleNamespace(
        **{
            "find_unused_parameters": False,
            "static_graph": False,
            "gradient_as_bucket_view": False,
            "process_group": SimpleNamespace(size=lambda: 3),
            "_has_rebuilt_buckets": True,
            "require_forward_param_sync": False,
            "reducer": SimpleNamespace(_reset_state=lambda: resets.append("reset")),
            "resets": resets,
            **fields,
        }
    )


def test_a_survivor_broadcasts_its_buffers_as_a_new_process_does() -> None:
    """DDP leaves that out in the forward after one without gradients: an evaluation that was cut off."""
    module = ddp()
    assert reset_ddp([("model", module)]) == ""
    assert module.require_forward_param_sync and module.resets == ["reset"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"_has_rebuilt_buckets": False}, "has not laid out its buckets"),
        ({"gradient_as_bucket_view": True}, "its next step would round otherwise at 3 ranks"),
    ],
)
def test_buckets_that_are_not_laid_out_yet_and_gradients_in_them_are_a_reason(fields: Any, reason: str) -> None:
    module = ddp(**fields)
    assert reason in reset_ddp([("model", module)])
    assert not module.resets


def test_a_group_with_new_connections_has_its_name() -> None:
    """Functional collectives look it up."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0], group_desc="for evaluations")
        assert isinstance(group, dist.ProcessGroup)
        before, old = (group.group_name, group.group_desc), group._get_backend(torch.device("cpu"))
        assert connect(dist.HashStore(), 0, 5.0) == 2
        new = group._get_backend(torch.device("cpu"))
        assert new is not old and new.name() == "gloo"
        assert (group.group_name, group.group_desc) == before
        assert functional.all_reduce(torch.ones(1), "sum", group).item() == 1.0
    finally:
        dist.destroy_process_group()
