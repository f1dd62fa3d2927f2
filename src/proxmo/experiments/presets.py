"""How large the training experiments are: as in the paper, or small enough for a laptop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PresetName = Literal["quick", "paper"]


@dataclass(frozen=True)
class Grid:
    """What is tried: all combinations with one seed, then the best of each method with more."""

    batches: tuple[int, ...]
    rates: tuple[float, ...]
    """lr = 1/M."""
    momenta: tuple[float, ...]
    """1 − γ; 0 is the vanilla method."""
    epochs: int


@dataclass(frozen=True)
class Preset:
    """The size of both training experiments."""

    width: int
    seeds: int
    regularized: Grid
    proxy: Grid
    proxy_images: int
    """How many training images ℓ̂ has."""
    proxy_batch: int


PAPER = Preset(
    width=64,
    seeds=3,
    regularized=Grid((256, 128, 64), rates=(1.0, 0.1, 0.01), momenta=(0.0, 0.9, 0.99), epochs=300),
    proxy=Grid((512,), rates=(1.0, 0.1, 0.01), momenta=(0.0, 0.9, 0.99), epochs=30),
    proxy_images=2560,
    proxy_batch=128,
)
QUICK = Preset(
    width=8,
    seeds=3,
    regularized=Grid((256,), rates=(0.3, 0.1, 0.03), momenta=(0.0, 0.9), epochs=10),
    proxy=Grid((512,), rates=(1.0, 0.1), momenta=(0.0, 0.9), epochs=3),
    proxy_images=2560,
    proxy_batch=128,
)
QUICK_ON_DIGITS = Preset(
    width=8,
    seeds=3,
    regularized=Grid((256, 128, 64), rates=(1.0, 0.1, 0.01), momenta=(0.0, 0.9, 0.99), epochs=12),
    proxy=Grid((256,), rates=(1.0, 0.1, 0.01), momenta=(0.0, 0.9), epochs=8),
    proxy_images=256,
    proxy_batch=64,
)


def preset(name: PresetName, data: str) -> Preset:
    """The preset of that name for a data set: the embedded digits are so few that they allow a wider grid.

    >>> preset("quick", "digits").regularized.epochs, preset("paper", "cifar10").regularized.epochs
    (12, 300)
    """
    if name == "paper":
        return PAPER
    return QUICK_ON_DIGITS if data == "digits" else QUICK
