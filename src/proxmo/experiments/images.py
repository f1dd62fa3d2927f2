"""Images as tensors in memory, and mini-batches of them, cropped and flipped in one go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Split:
    """Images (n, height, width, channels), 8 bits each, and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Images:
    """A data set of images, with what suits it as augmentation: crops after padding, flips or none."""

    name: str
    train: Split
    test: Split
    classes: int
    padding: int
    flip: bool

    @property
    def channels(self) -> int:
        """1 if grey, 3 if in colour."""
        return self.train.images.shape[-1]

    @cached_property
    def scale(self) -> Scale:
        """From bytes to normalised floats."""
        return Scale(self.train.images)


class Batches:
    """Mini-batches of a split as normalised float images in channels-last memory, with labels.

    Mean and deviation per channel are those of ``images.train``. Each epoch is a new permutation, and the last part of
    it that does not fill a batch is left out, so that all steps of a run see the same batch size.

    Args:
        images: the data set.
        size: images per batch.
        generator: decides order, crops and flips; its state is all that has to be kept to go on.
        only: use these images of the training data alone.
        device: where the batches go.

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
            raise ValueError(f"size must be between 1 and the {len(chosen)} images at hand, got {size}")
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
    """All of a split in order, without augmentation, normalised as the training data are."""
    for chunk, labels in zip(torch.split(split.images, size), torch.split(split.labels, size), strict=True):
        yield images.scale(chunk.to(device)), labels.to(device)


class Scale:
    """From bytes, channels last, to floats of mean 0 and deviation 1 per channel, in torch's order of axes."""

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
