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
        """The factor at which the check would fail: the bound divided by the observed value; −∞ for NaN."""
        if math.isnan(self.observed) or math.isnan(self.bound):
            return -math.inf
        if self.observed > 0 and math.isfinite(self.observed):
            return self.bound / self.observed
        return math.inf if self.holds else -math.inf

    @property
    def holds(self) -> bool:
        """Whether the statement holds, up to rounding."""
        return math.isfinite(self.observed) and self.observed <= self.bound * (1 + 1e-9) + 1e-12


def tightest(statement: str, where: str, pairs: Iterable[tuple[float, float]]) -> Check:
    """Return the instance with the smallest factor out of many pairs (observed, bound)."""
    return min((Check(statement, where, *pair) for pair in pairs), key=lambda one: one.factor)
