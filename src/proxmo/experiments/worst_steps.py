"""One step of the method at its worst: instances on a line that nearly attain the inequalities of the theory.

With L = 1 and M = τ a step is given by e = m − ∇f(x), d = ∇f(x⁺) − ∇f(x), r = x⁺ − x and w = ∇Ω(x⁺), the error of an
inexact prox. All numbers e, and all d with |d| ≤ |r|, belong to a real problem: f' rises with slope 1 and then falls
with slope −1 on the way from x to x⁺ (a quadratic if |d| = |r|), which makes f(x⁺) as large as smoothness allows,

    f(x⁺) = f(x) + f'(x)·r + d·r/2 + r²/4 − d²/4.

ψ is linear in the convex regimes, ψ(x⁺) = ψ(x) + (w − m − τr)·r; in the others it makes the subproblem as large at x⁺
as at x, ψ(x⁺) = ψ(x) − m·r − τr²/2. The momentum error of the next step is E(m⁺ − ∇f(x⁺))² = (1−γ)²(e − d)² + γ²σ².
If f and ψ are multiplied by L, and M with them, F and Φ are multiplied by L, and squared gradients and errors by L².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from proxmo.experiments.check import Check
from proxmo.theory import Regime

SMOOTHNESS = 2.0  # where bounds are asked for: L = 1 would hide an L that is missing
NOISE = 3.0  # σ², which raises Φ by as much as a bound allows for
TIMES_FLOOR = (1.0, 1.2, 2.0, 10.0, 100.0)  # τ relative to its smallest value
LINE = "line"
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """Many steps at once; all arrays broadcast."""

    tau: float
    e: Numbers
    d: Numbers
    r: Numbers
    w: Numbers

    @property
    def gradient(self) -> Numbers:
        """F'(x⁺)²."""
        return np.square(self.d - self.e - self.tau * self.r + self.w)

    def rise(self, *, convex: bool) -> Numbers:
        """F(x⁺) − F(x)."""
        curved = self.d * self.r / 2 + np.square(self.r) / 4 - np.square(self.d) / 4 - self.e * self.r
        if convex:
            return curved + self.w * self.r - self.tau * np.square(self.r)
        return curved - self.tau / 2 * np.square(self.r) + 0 * self.w

    def fall_of_potential(self, row: Regime) -> Numbers:
        """Φ − EΦ⁺."""
        gamma = row.gamma(self.tau * SMOOTHNESS, SMOOTHNESS)
        noise = gamma**2 * NOISE / SMOOTHNESS**2
        errors = (1 - gamma) ** 2 * np.square(self.e - self.d) + noise - np.square(self.e)
        return -(self.rise(convex=row.name.startswith("convex")) + row.alpha * errors)


def steps_at(tau: float, squared_error: float | None = None) -> Steps:
    """Return a grid of steps: all ratios of e, d and r, and an inexact prox with ‖w‖² = (τ²/16)r² + S if S is given."""
    d = np.linspace(-1, 1, 9)[:, None, None]
    if not squared_error:
        r, e = np.ones((1, 1, 1, 1)), tau * np.linspace(-2, 2, 401)
    else:  # the ratios of r and e to √S matter
        lengths = np.array([0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5]) * 4 * math.sqrt(squared_error) / tau
        r, e = lengths[:, None, None, None], 4 * math.sqrt(squared_error) * np.linspace(-2, 2, 101)
    w = np.zeros(1) if squared_error is None else np.array([-1, 1]) * np.sqrt(tau**2 / 16 * r**2 + squared_error)
    return Steps(tau, e[:, None], d * r, r, w)


def _least_factor(statement: str, observed: Numbers, bound: Numbers) -> Check:
    """Return the instance with the smallest ratio of bound to observed value."""
    observed, bound = np.broadcast_arrays(observed, bound)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(observed > 0, bound / observed, np.where(bound >= -1e-12, np.inf, -np.inf))
    worst = np.unravel_index(np.argmin(ratio), ratio.shape)
    return Check(statement, LINE, float(observed[worst]), float(bound[worst]))


def descent(row: Regime) -> list[Check]:
    """Check the bounds of one step, which are Φ − EΦ⁺ plus noise, divided by c or v/N, at worst steps for several M.

    They are G ≤ bound(Φ − EΦ⁺) with an exact prox, or with one of squared error S, and the same for the momentum error
    with what it leaves for G.
    """
    found: dict[str, list[Check]] = {}
    for tau in (row.floor * times for times in TIMES_FLOOR):
        M, steps = tau * SMOOTHNESS, steps_at(tau, None if row.inexact_ratio is None else 0.0)
        statement = f"{row.name}: E‖∇F‖² of a step"
        found.setdefault(statement, []).append(_bounded_gradient(row, statement, steps))
        if row.variance_descent is not None:
            statement = f"{row.name}: E‖m−∇f‖² of a step"
            for_gradient = {"paper": 0.0, "paper_refined": 1.0, "convex": 0.5}[row.name]
            spent = for_gradient * row.decrease(M, SMOOTHNESS) * SMOOTHNESS**2 * steps.gradient
            left = SMOOTHNESS * steps.fall_of_potential(row) - spent
            bound = _of_arrays(row.variance_bound)(M, SMOOTHNESS, NOISE, left)
            found.setdefault(statement, []).append(_least_factor(statement, SMOOTHNESS**2 * np.square(steps.e), bound))
        if row.inexact_ratio is not None:
            statement = f"{row.name}: E‖∇F‖² with S=1"
            found.setdefault(statement, []).append(_bounded_gradient(row, statement, steps_at(tau, 1.0), 1.0))
    return [min(checks, key=lambda one: one.factor) for checks in found.values()]


def _bounded_gradient(row: Regime, statement: str, steps: Steps, squared_error: float = 0.0) -> Check:
    fall, error = SMOOTHNESS * steps.fall_of_potential(row), SMOOTHNESS**2 * squared_error
    bound = _of_arrays(row.bound)(steps.tau * SMOOTHNESS, SMOOTHNESS, NOISE, fall, error)
    return _least_factor(statement, SMOOTHNESS**2 * steps.gradient, bound)


def _of_arrays(bound: Callable[..., float]) -> Callable[..., Numbers]:
    """Return a formula for numbers as one for arrays, which it works for as well."""
    return cast("Callable[..., Numbers]", bound)


def lemmas() -> list[Check]:
    """Check the three inequalities of the paper's proof where they are tightest: near M = 4L, or for all M."""
    found: dict[str, list[Check]] = {}
    for tau in (4.0, 10.0, 100.0):
        steps, n = steps_at(tau), tau - 1
        for gamma in (0.1, 0.5, 0.9):
            mean = (1 - gamma) ** 2 * np.square(steps.e - steps.d)
            bound = (1 - gamma) * np.square(steps.e) + np.square(steps.r) / gamma
            found.setdefault("lemma on the momentum error", []).append(_least_factor("", mean, bound))
        left = steps.rise(convex=False) + n / 4 * np.square(steps.r)
        found.setdefault("lemma on the objective", []).append(_least_factor("", left, np.square(steps.e) / n))
        right = 3 * (tau**2 + 1) * np.square(steps.r) + 3 * np.square(steps.e)
        found.setdefault("lemma on the gradient", []).append(_least_factor("", steps.gradient, right))
    closest = {statement: min(checks, key=lambda one: one.factor) for statement, checks in found.items()}
    return [Check(statement, LINE, one.observed, one.bound) for statement, one in closest.items()]
