"""The sizes of the training experiments: as in the paper, or small enough for a laptop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

PresetName = Literal["quick", "medium", "paper"]
T = TypeVar("T")


@dataclass(frozen=True)
class Grid:
    """The settings to try: all combinations."""

    batches: tuple[int, ...]
    rates: tuple[float, ...]
    """lr = 1/M."""
    momenta: tuple[float, ...]
    """1 − γ; 0 is the vanilla method."""
    epochs: int
    annealed: float | None = None
    """The lr from which momentum at the largest batch is also run with lr and 1 − momentum annealed together."""
    repeat_all: bool = False
    """Whether the best settings of all batch sizes are repeated, not only those of the largest one."""

    def to_json(self) -> dict[str, list[float] | float | None]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Size:
    """The size of a training experiment."""

    width: int
    """Base width of the network."""
    grid: Grid
    seeds: int = 3
    """Seeds of the best settings; the rest of the grid runs with one."""


@dataclass(frozen=True)
class Presets(Generic[T]):
    """One value for each preset. The quick preset has a separate one for the built-in digits, which train faster.

    >>> presets = Presets(paper=64, medium=10, quick=8, quick_on_digits=16)
    >>> presets.choose("paper", "cifar10"), presets.choose("quick", "cifar10"), presets.choose("quick", "digits")
    (64, 8, 16)
    """

    paper: T
    medium: T
    quick: T
    quick_on_digits: T

    def choose(self, preset: PresetName, data: str) -> T:
        """Return the value for a preset and a data set."""
        if preset != "quick":
            return self.paper if preset == "paper" else self.medium
        return self.quick_on_digits if data == "digits" else self.quick
