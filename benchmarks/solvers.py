"""The methods to compare: each has an optimizer, a way to step it, and 42 settings to tune over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Protocol

from proxmo import Penalty, ProxHybridSGD, ProxOptimizer, ProxSGD, ProxSpiderBoost, ProxSTORM

Closure = Callable[[], None]

RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
BATCHES = (16, 64)
MOMENTA = (0.7, 0.9, 0.99)


@dataclass(frozen=True)
class Setting:
    """Tuned quantities. Settings with equal batch and period can run together."""

    lr: float
    batch: int
    momentum: float = 0.0
    averaging: float = 1.0
    period: int = 1


class Oracle(Protocol):
    """Source of closures; counts the gradients that they evaluate."""

    def sample(self, size: int) -> Closure:
        """Return a closure on a new mini-batch."""

    def everything(self) -> Closure:
        """Return a closure on all data."""


class Solver(ABC):
    """A method and its grid of 42 settings: 7 step sizes times 6 values of its other options."""

    name: str
    options: tuple[str, ...]
    """Fields of a setting that the optimizer takes."""

    @abstractmethod
    def grid(self, size: int) -> list[Setting]:
        """Return the settings for data of ``size`` samples."""

    @abstractmethod
    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        """Return an optimizer of these parameter groups, one per setting."""

    @abstractmethod
    def cost(self, optimizer: Any, batch: int, size: int) -> int:
        """Return how many gradients the next step evaluates."""

    def step(self, optimizer: Any, batch: int, oracle: Oracle) -> None:
        """Take one step of all parameter groups."""
        optimizer.step(oracle.sample(batch))


class Vanilla(Solver):
    """Proximal SGD; with a batch of all data, proximal gradient descent."""

    name = "vanilla"
    options = ("lr", "momentum")

    def grid(self, size: int) -> list[Setting]:
        batches = sorted({4, 16, 64, 256, size // 2, size})
        return [Setting(lr, batch) for lr, batch in product(RATES, batches)]

    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        return ProxSGD(groups, penalty=penalty)

    def cost(self, optimizer: Any, batch: int, size: int) -> int:
        return batch


class Momentum(Vanilla):
    name = "momentum"

    def grid(self, size: int) -> list[Setting]:
        return [Setting(lr, batch, momentum) for lr, batch, momentum in product(RATES, BATCHES, MOMENTA)]


class Storm(Momentum):
    name = "STORM"

    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        return ProxSTORM(groups, penalty=penalty)

    def cost(self, optimizer: Any, batch: int, size: int) -> int:
        return 2 * batch if optimizer.state else batch


class Hybrid(Solver):
    """Hybrid SGD; its first batch is 16 times as large, as its theory requires."""

    name = "hybrid SGD"
    options = ("lr", "momentum", "averaging")

    def grid(self, size: int) -> list[Setting]:
        weights = ((0.9, 1.0), (0.99, 1.0), (0.99, 0.3))
        return [Setting(lr, batch, *pair) for lr, batch, pair in product(RATES, BATCHES, weights)]

    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        return ProxHybridSGD(groups, penalty=penalty)

    def cost(self, optimizer: Any, batch: int, size: int) -> int:
        return 3 * batch if optimizer.state else 16 * batch

    def step(self, optimizer: Any, batch: int, oracle: Oracle) -> None:
        first = not optimizer.state
        optimizer.step(oracle.sample(16 * batch if first else batch), oracle.sample(batch))


class SpiderBoost(Solver):
    """Full gradient at the start of each period; the rest of the period costs about as much."""

    name = "SpiderBoost"
    options = ("lr", "period")

    def grid(self, size: int) -> list[Setting]:
        root = math.sqrt(size)
        batches = sorted({max(round(root * factor), 1) for factor in (0.125, 0.25, 0.5, 1, 2, 4)})
        return [Setting(lr, batch, period=max(size // (2 * batch), 1)) for lr, batch in product(RATES, batches)]

    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        return ProxSpiderBoost(groups, penalty=penalty)

    def cost(self, optimizer: Any, batch: int, size: int) -> int:
        return size if optimizer.large_batch_is_due else 2 * batch

    def step(self, optimizer: Any, batch: int, oracle: Oracle) -> None:
        optimizer.step(oracle.sample(batch), oracle.everything())


SOLVERS: list[Solver] = [Vanilla(), Momentum(), Storm(), Hybrid(), SpiderBoost()]


def edges(setting: Setting, grid: list[Setting]) -> list[str]:
    """Return the quantities whose value is the first or last of at least three in the grid."""
    found = []
    for field in fields(Setting):
        values = sorted({getattr(other, field.name) for other in grid})
        if len(values) > 2 and getattr(setting, field.name) in (values[0], values[-1]):
            found.append(field.name)
    return found
