"""A numerical check of one statement of the theory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A statement that ``observed`` does not exceed ``bound``."""

    statement: str
    where: str
    observed: float
    bound: float

    @property
    def factor(self) -> float:
        """The factor at which the check would fail: the bound divided by the observed value."""
        if self.observed > 0:
            return self.bound / self.observed
        return math.inf if self.holds else -math.inf

    @property
    def holds(self) -> bool:
        """Whether the statement holds, up to rounding."""
        return math.isfinite(self.observed) and self.observed <= self.bound * (1 + 1e-9) + 1e-12


def tightest(statement: str, where: str, pairs: Iterable[tuple[float, float]]) -> Check:
    """Return the instance with the smallest factor out of many pairs (observed, bound); a NaN counts as smallest."""
    checks = [Check(statement, where, *pair) for pair in pairs]
    return min(checks, key=lambda one: -math.inf if math.isnan(one.factor) else one.factor)
