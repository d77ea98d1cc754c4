from __future__ import annotations

import torch

from resnet import BasicBlock, ResNet20


def test_resnet20_has_the_papers_number_of_parameters() -> None:
    network = ResNet20()
    assert sum(parameter.numel() for parameter in network.parameters()) == 269_722
    weighted = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weighted) == 20 - 1 + 1  # 19 convolutions and the fully connected layer


def test_shapes_through_the_stages() -> None:
    network = ResNet20(num_classes=7).eval()
    x = torch.zeros(2, 3, 32, 32)
    first = network.stage1(torch.zeros(2, 16, 32, 32))
    second = network.stage2(first)
    assert tuple(first.shape) == (2, 16, 32, 32)
    assert tuple(second.shape) == (2, 32, 16, 16)
    assert tuple(network.stage3(second).shape) == (2, 64, 8, 8)
    assert tuple(network(x).shape) == (2, 7)


def test_a_shortcut_keeps_every_second_pixel_and_pads_channels_with_zeros() -> None:
    block = BasicBlock(4, 8, stride=2)
    x = torch.randn(1, 4, 6, 6)
    y = block.shortcut(x)
    assert tuple(y.shape) == (1, 8, 3, 3)
    assert torch.equal(y[:, 2:6], x[:, :, ::2, ::2])
    assert not y[:, :2].any() and not y[:, 6:].any()


def test_one_seed_gives_one_network() -> None:
    networks = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        networks.append(ResNet20().conv1.weight)
    assert torch.equal(networks[0], networks[1])
    assert not torch.equal(networks[0], networks[2])
