from __future__ import annotations

import pytest
import torch
from torch import nn

from mindx_elastic.config import RankInfo
from mindx_elastic.errors import UsageError
from mindx_elastic.train.parallel import choose_device
from tests.train.small_job import make_network


def test_devices() -> None:
    network = make_network()
    assert choose_device("cpu", network, RankInfo()) == torch.device("cpu")
    assert choose_device(None, nn.Linear(1, 1, device="meta"), RankInfo()).type == "meta"
    if not torch.cuda.is_available():
        assert choose_device(None, network, RankInfo()).type == "cpu"
        with pytest.raises(UsageError, match="no CUDA device"):
            choose_device("cuda:1", network, RankInfo())
