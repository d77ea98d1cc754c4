"""ResNet-20 for pictures of 32x32, as in He et al. (2015), section 4.2, in plain PyTorch.

Three stages of three blocks with 16, 32 and 64 channels. Shortcuts are the paper's option A: where the shape
changes, every second pixel is taken and the new channels are zero, so that a shortcut has no parameters.
269,722 parameters for ten classes, which is the paper's 0.27M.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["BasicBlock", "ResNet20"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut without parameters.

    Input ``(N, in_channels, H, W)``, output ``(N, out_channels, H / stride, W / stride)``.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.new_channels = out_channels - in_channels

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            x = functional.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + self.shortcut(x))


class ResNet20(nn.Module):
    """The network. Input ``(N, 3, 32, 32)`` float, output ``(N, num_classes)`` logits.

    The weights are drawn from torch's global random generator: seed it first for the same start every time.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stage1 = self._stage(16, 16, stride=1)
        self.stage2 = self._stage(16, 32, stride=2)
        self.stage3 = self._stage(32, 64, stride=2)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(in_channels: int, out_channels: int, *, stride: int) -> nn.Sequential:
        return nn.Sequential(
            BasicBlock(in_channels, out_channels, stride),
            BasicBlock(out_channels, out_channels),
            BasicBlock(out_channels, out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        # A mean over the last two axes is the global average pool; unlike adaptive_avg_pool2d its backward is
        # deterministic on CUDA too.
        logits: Tensor = self.fc(torch.mean(x, dim=(2, 3)))
        return logits
