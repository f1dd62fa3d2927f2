"""Checks of every constant of a regime, and the factor by which each would have to be wrong to be noticed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from proxmo import theory
from proxmo.experiments.check import Check, tightest
from proxmo.experiments.worst_steps import descent
from proxmo.theory import Rates, Regime

CONSTANTS = ("floor", "gain", "alpha", "descent", "slope", "remainder", "variance_descent", "inexact_ratio")
LARGEST_FACTOR = 16.0
FORMULA = "formula"
L, PHI, STEPS = 2.0, 3.0, 5  # where formulas are compared: ones would hide a factor that is missing


def checks_of(row: Regime) -> Iterator[Check]:
    """Yield all checks that depend on nothing but the constants of a regime, those that take longest last."""
    yield Check(f"{row.name}: γ ≤ 1", FORMULA, row.gain / row.scale(row.floor, 1.0), 1.0)
    yield from _rate(row)
    yield _planned_M(row)
    yield _noise(row)
    yield from descent(row)


def _noise(row: Regime) -> Check:
    """At a stationary point with m = ∇f nothing happens but noise, which raises Φ: exact moments of one step."""

    def pairs() -> Iterator[tuple[float, float]]:
        for M in (row.floor * L, 3 * row.floor * L):
            rates = Rates(1 / M, 1 - row.gamma(M, L))
            moments = theory.quadratic_moments(
                lambda k, rates=rates: rates,  # type: ignore[misc]
                smoothness=L, curvature=0.0, noise_variance=4.0, start=0.0, horizon=1, initial="zero",
            )  # fmt: skip
            yield row.alpha / L * moments.variance[1], row.noise(M, L, 4.0)

    return tightest(f"{row.name}: noise in Φ", "quadratic", pairs())


def _rate(row: Regime) -> list[Check]:
    """The bound at the planned M is at most A·√(L·Φ₀·σ²/K) + B·L·Φ₀/K for all σ."""
    sigmas = [10 ** (exponent / 4) for exponent in range(-16, 25)]

    def rate(sigma: float, of_noise: float, remainder: float) -> float:
        return of_noise * sigma * math.sqrt(L * PHI / STEPS) + remainder * L * PHI / STEPS

    def pairs() -> Iterator[tuple[float, float]]:
        for sigma in sigmas:
            M = row.best_M(L, sigma**2, PHI, STEPS)
            yield row.bound(M, L, sigma**2, PHI / STEPS), rate(sigma, row.rate, row.remainder)

    def of_variance() -> Iterator[tuple[float, float]]:
        for sigma in sigmas:
            M = row.best_M(L, sigma**2, PHI, STEPS)
            bound = rate(sigma, row.variance_rate, row.variance_remainder)
            yield row.variance_bound(M, L, sigma**2, PHI / STEPS), bound

    found = [tightest(f"{row.name}: bound ≤ rate", FORMULA, pairs())]
    if row.variance_descent is not None:
        found.append(tightest(f"{row.name}: variance ≤ its rate", FORMULA, of_variance()))
    return found


def _planned_M(row: Regime) -> Check:
    """With much noise no other M has a smaller bound; the paper's is allowed 10%, since it balances relaxed terms."""
    variance = 1e12
    planned = row.best_M(L, variance, PHI, STEPS)
    others = [row.bound(planned * factor, L, variance, PHI / STEPS) for factor in np.geomspace(1 / 8, 8, 385).tolist()]
    allowed = 1.1 if row.shifted else 1 + 1e-4
    bound = row.bound(planned, L, variance, PHI / STEPS)
    return Check(f"{row.name}: planned M is best", FORMULA, bound, allowed * min(others))


def noticed_factors(row: Regime) -> dict[str, tuple[float | None, float | None]]:
    """Return for each constant the factors at which a check fails: if it is multiplied, and if it is divided by them.

    ``None`` if no factor up to 16 is noticed, as where the claim becomes weaker, hence stays true.
    """
    constants = [name for name in CONSTANTS if getattr(row, name) is not None]
    return {name: (_noticed(row, name, 1), _noticed(row, name, -1)) for name in constants}


def _noticed(row: Regime, constant: str, sign: int) -> float | None:
    def fails(factor: float) -> bool:
        changed = replace(row, **{constant: getattr(row, constant) * factor**sign})
        try:
            return not all(check.holds for check in checks_of(changed))
        except (ValueError, ArithmeticError):  # no such M or γ
            return True

    if not fails(LARGEST_FACTOR):
        return None
    below, above = 1.0, LARGEST_FACTOR
    while above / below > 1.02:
        middle = math.sqrt(below * above)
        below, above = (below, middle) if fails(middle) else (middle, above)
    return above
