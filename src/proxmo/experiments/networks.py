"""The network of the experiments: ResNet-18 of any width, with a stem for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    """Two convolutions with batch norm, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)), inplace=True)
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """ResNet-18 for 32×32 images and smaller: a 3×3 stem without pooling, four stages, a linear head.

    Args:
        width: the number of channels of the first stage, doubled in each later one; 64 is the standard network.
        channels: the number of image channels.
        classes: the number of classes.

    >>> import torch
    >>> ResNet18(width=8, channels=3, classes=10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in ResNet18(64, 3, 10).parameters())
    11173962
    """

    def __init__(self, width: int, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        widths = [width * 2**stage for stage in range(4)]
        blocks = []
        for stage, outputs in enumerate(widths):
            before = widths[max(stage - 1, 0)]
            blocks += [_Block(before, outputs, stride=1 if stage == 0 else 2), _Block(outputs, outputs, stride=1)]
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(functional.relu(self.stem_norm(self.stem(images)), inplace=True))
        scores: Tensor = self.head(features.mean((2, 3)))
        return scores
