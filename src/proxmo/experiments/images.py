"""Image data sets in memory, and augmented mini-batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Split:
    """Images as uint8 of shape (n, height, width, channels), and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Images:
    """A data set of images, and its augmentation: random crops after ``padding``, and random flips if ``flip``."""

    name: str
    train: Split
    test: Split
    classes: int
    padding: int
    flip: bool

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return self.train.images.shape[-1]

    @cached_property
    def scale(self) -> Scale:
        """Converts bytes to normalised floats."""
        return Scale(self.train.images)


class Batches:
    """Mini-batches of the training images as normalised floats in channels-last memory, with labels.

    Images are normalised with the mean and standard deviation per channel of ``images.train``. Each epoch is a new
    permutation; an incomplete last batch is dropped, so that all batches have the same size.

    Args:
        images: the data set.
        size: the number of images per batch.
        generator: determines order, crops and flips; its state is all there is to checkpoint.
        only: the indices of the training images to use; ``None`` for all.
        device: where to put the batches.

    >>> split = Split(torch.zeros(10, 8, 8, 1, dtype=torch.uint8), torch.arange(10))
    >>> images = Images("zeros", split, split, classes=10, padding=1, flip=False)
    >>> [tuple(x.shape) for x, _ in Batches(images, 4, torch.Generator().manual_seed(0))]
    [(4, 1, 8, 8), (4, 1, 8, 8)]
    """

    def __init__(
        self,
        images: Images,
        size: int,
        generator: torch.Generator,
        *,
        only: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        chosen = torch.arange(len(images.train)) if only is None else only
        if not 1 <= size <= len(chosen):
            raise ValueError(f"size must be between 1 and the number of images, {len(chosen)}, got {size}")
        self._size, self._generator, self._device = size, generator, torch.device(device)
        self._flip, self._padding = images.flip, images.padding
        around = (0, 0, images.padding, images.padding, images.padding, images.padding)
        self._padded = functional.pad(images.train.images[chosen], around).to(self._device)
        self._labels = images.train.labels[chosen].to(self._device)
        self._scale = images.scale

    def __len__(self) -> int:
        return len(self._labels) // self._size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self._labels), generator=self._generator)
        for rows in torch.split(order, self._size)[: len(self)]:
            yield self._batch(rows)

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        count = len(rows)
        height, width = (side - 2 * self._padding for side in self._padded.shape[1:3])
        corners = torch.randint(2 * self._padding + 1, (2, count, 1), generator=self._generator)
        y, x = corners[0] + torch.arange(height), corners[1] + torch.arange(width)
        if self._flip:
            flipped = torch.rand(count, 1, generator=self._generator) < 0.5
            x = torch.where(flipped, x.flip(1), x)
        rows, y, x = (index.to(self._device) for index in (rows, y, x))
        return self._scale(self._padded[rows[:, None, None], y[:, :, None], x[:, None, :]]), self._labels[rows]


def plain_batches(
    images: Images, split: Split, size: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all images of a split in order, without augmentation, normalised like the training images."""
    for chunk, labels in zip(torch.split(split.images, size), torch.split(split.labels, size), strict=True):
        yield images.scale(chunk.to(device)), labels.to(device)


class Scale:
    """Converts NHWC bytes to NCHW floats with mean 0 and standard deviation 1 per channel."""

    def __init__(self, images: Tensor) -> None:
        counts = [
            torch.bincount(images[..., c].flatten().long(), minlength=256).double() for c in range(images.shape[-1])
        ]
        values = torch.arange(256, dtype=torch.float64)
        means = [(count @ values) / count.sum() for count in counts]
        squares = [(count @ (values - mean).square()) / count.sum() for count, mean in zip(counts, means, strict=True)]
        self._mean = torch.stack(means).float()
        self._deviation = torch.stack(squares).sqrt().clamp(min=1).float()

    def __call__(self, images: Tensor) -> Tensor:
        mean, deviation = self._mean.to(images.device), self._deviation.to(images.device)
        return ((images.float() - mean) / deviation).permute(0, 3, 1, 2)
