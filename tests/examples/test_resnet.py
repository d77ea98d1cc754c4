from __future__ import annotations

import torch

from resnet import ResNet20


def test_resnet20_has_the_papers_number_of_parameters() -> None:
    network = ResNet20()
    assert sum(parameter.numel() for parameter in network.parameters()) == 269_722
    weighted = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weighted) == 20 - 1 + 1  # 19 convolutions and the fully connected layer
