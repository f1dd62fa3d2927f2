"""The methods that are compared: for each the optimizer, how it takes a step, and the 21 settings to tune over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from proxmo import Penalty, ProxHybridSGD, ProxOptimizer, ProxSGD, ProxSpiderBoost, ProxSTORM

Closure = Callable[[], None]

RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MOMENTA = (0.9, 0.99, 0.999)
BATCH = 16


@dataclass(frozen=True)
class Setting:
    """What is tuned. Settings with the same batch and period can run side by side."""

    lr: float
    batch: int = BATCH
    momentum: float = 0.0
    averaging: float = 1.0
    period: int = 1


class Oracle(Protocol):
    """Where closures come from; it counts the gradients that they evaluate."""

    def sample(self, size: int) -> Closure:
        """A closure on a new mini-batch."""

    def everything(self) -> Closure:
        """A closure on all data."""


class Solver(ABC):
    """A method."""

    name: str
    options: tuple[str, ...]
    """What it takes of a setting."""

    @abstractmethod
    def grid(self, size: int) -> list[Setting]:
        """The settings for ``size`` samples in the data."""

    @abstractmethod
    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        """The optimizer of parameter groups, one per setting."""

    def step(self, optimizer: Any, batch: int, oracle: Oracle) -> None:
        """One step of all groups."""
        optimizer.step(oracle.sample(batch))


class Vanilla(Solver):
    """Proximal SGD; with the largest batch it is the mega-batch method."""

    name = "vanilla"
    options = ("lr", "momentum")

    def grid(self, size: int) -> list[Setting]:
        return [Setting(lr, batch) for lr, batch in product(RATES, (BATCH, 4 * BATCH, 16 * BATCH))]

    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        return ProxSGD(groups, penalty=penalty)


class Momentum(Vanilla):
    name = "momentum"

    def grid(self, size: int) -> list[Setting]:
        return [Setting(lr, momentum=momentum) for lr, momentum in product(RATES, MOMENTA)]


class Storm(Momentum):
    name = "STORM"

    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        return ProxSTORM(groups, penalty=penalty)


class Hybrid(Solver):
    """Starts from a batch 16 times as large, as its theory asks."""

    name = "hybrid SGD"
    options = ("lr", "momentum", "averaging")

    def grid(self, size: int) -> list[Setting]:
        cells = product(RATES, ((0.9, 1.0), (0.99, 1.0), (0.99, 0.3)))
        return [Setting(lr, momentum=momentum, averaging=averaging) for lr, (momentum, averaging) in cells]

    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        return ProxHybridSGD(groups, penalty=penalty)

    def step(self, optimizer: Any, batch: int, oracle: Oracle) -> None:
        first = not optimizer.state
        optimizer.step(oracle.sample(16 * batch if first else batch), oracle.sample(batch))


class SpiderBoost(Solver):
    """Full gradients at the start of each period, which is as long as the differences in it cost one of them."""

    name = "SpiderBoost"
    options = ("lr", "period")

    def grid(self, size: int) -> list[Setting]:
        root = math.isqrt(size)
        return [
            Setting(lr, batch, period=max(size // (2 * batch), 1))
            for lr, batch in product(RATES, sorted({max(root // 4, 1), root // 2, root}))
        ]

    def optimizer(self, groups: list[dict[str, Any]], penalty: Penalty) -> ProxOptimizer:
        return ProxSpiderBoost(groups, penalty=penalty)

    def step(self, optimizer: Any, batch: int, oracle: Oracle) -> None:
        optimizer.step(oracle.sample(batch), oracle.everything())


SOLVERS: list[Solver] = [Vanilla(), Momentum(), Storm(), Hybrid(), SpiderBoost()]
