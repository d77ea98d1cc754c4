"""What a spare does ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from mindx_elastic.capture.ddp import GradientOrder
from mindx_elastic.capture.rng import capture_rng, equal_rng
from mindx_elastic.rejoin import spare_warmup


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))


def test_the_buckets_are_laid_out_by_the_order_that_the_ranks_have_written(tmp_path: Path, group: None) -> None:
    module, order = model(), [2, 3, 0, 1]
    spare_warmup.share_orders(tmp_path, "4", {"model": order})
    assert not module._has_rebuilt_buckets
    assert spare_warmup.lay_out_buckets([("model", module)], tmp_path, "4") == {"model": order}
    assert module._has_rebuilt_buckets
    assert not module.reducer._rebuild_buckets(), "torch does it once"
    assert len(GradientOrder(module).parameters) == len(order)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["gradients.json"]


def test_without_an_order_that_fits_nothing_is_done(tmp_path: Path, group: None) -> None:
    module = model()
    assert spare_warmup.lay_out_buckets([("model", module)], tmp_path, "0") == {}
    texts = ["", "[", "[7]", '["0", {"other": [0]}]', '["0", {"model": [0, 1]}]', '["0", {"model": []}]']
    for text in [*texts, '["1", {"model": [0, 1, 2, 3]}]']:  # the last one is of another attempt
        (tmp_path / "gradients.json").write_text(text)
        assert spare_warmup.lay_out_buckets([("model", module)], tmp_path, "0") == {}
    assert not module._has_rebuilt_buckets


class Notes(TorchFunctionMode):
    """A mode of the program's that sees each call of torch in its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_torchs_kernels_are_used_beside_the_program_and_without_it() -> None:
    """No number is drawn, no hook and no mode of the program sees a call."""
    called: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: called.append(arguments))
    before = capture_rng()
    try:
        with Notes() as notes:
            spare_warmup.start_kernels().join()
    finally:
        handle.remove()
    assert not called and not notes.seen
    assert equal_rng(before, capture_rng())
