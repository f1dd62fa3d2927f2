"""Parameters of the variance-reduced methods, and their guarantees.

They assume more of f than momentum does: samples are L-smooth in mean square, E‖∇f(x; ξ) − ∇f(y; ξ)‖² ≤ L²‖x − y‖².
The guarantees bound the prox-gradient mapping G with step size lr, for a convex ψ. With r = x̂ − x the move of the prox,
e the error of the gradient estimate, lr = η = 1/(2L) and averaging γ, one step gives

    F⁺ ≤ F + (γη/2)·‖e‖² − (γ/2η)(1 − γLη)·‖r‖²  and  ‖G‖² ≤ 2·‖r‖²/η² + 2·‖e‖²,

and the moves bound the errors: Σ‖e‖² ≤ L²·Σ‖r‖² + noise, if batch ≥ period in SpiderBoost, or γ² ≤ 2·(1 − β) in hybrid
SGD. Summed over the steps, (γL/4)·Σ‖r‖² ≤ F₀ + (γη/2)·noise, and so Σ‖G‖² ≤ (40·L/γ)·F₀ + 12·noise, in expectation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from proxmo import checks
from proxmo.theory.plans import Rates, require_usable, steps


class SpiderBoostPlan(NamedTuple):
    """Settings for `ProxSpiderBoost`, and the bound on the mean of E‖G‖² over x₀ … x_{K−1}."""

    lr: float
    period: int
    batch: int
    """The number of samples in the closure, except at the start of a period."""
    large_batch: int
    """The number of samples in the closure at the start of a period."""
    guarantee: float


def spiderboost_plan(
    *, smoothness: float, initial_gap: float, horizon: int, large_batch: int, noise_variance: float = 0.0
) -> SpiderBoostPlan:
    """Return a plan with lr = 1/(2L), period and batch ⌈√B⌉: the mean of E‖G‖² is at most 40·L·F₀/K + 12·σ²/B.

    Args:
        smoothness: L > 0 in mean square.
        initial_gap: F₀ ≥ 0.
        horizon: K ≥ 1 steps.
        large_batch: B, the size of the large batch: all n samples, or a random batch.
        noise_variance: σ² of one sample if the large batch is random; 0 if it is all data.

    >>> spiderboost_plan(smoothness=2.0, initial_gap=1.0, horizon=1000, large_batch=10_000)
    SpiderBoostPlan(lr=0.25, period=100, batch=100, large_batch=10000, guarantee=0.08)
    """
    L = checks.more_than(0, "smoothness", smoothness)
    gap = checks.nonnegative("initial_gap", initial_gap)
    variance = checks.nonnegative("noise_variance", noise_variance)
    checks.count("large_batch", large_batch, least=1)
    root = math.isqrt(large_batch - 1) + 1
    bound = 40 * L * gap / steps(horizon) + 12 * variance / large_batch
    return SpiderBoostPlan(1 / (2 * L), root, root, large_batch, bound)


class HybridPlan(NamedTuple):
    """Settings for `ProxHybridSGD`, and the bound on the mean of E‖G‖² over x₀ … x_{K−1}."""

    lr: float
    momentum: float
    averaging: float
    initial_batch: int
    """The number of samples in the closure of the first step."""
    guarantee: float


def hybrid_plan(
    *,
    smoothness: float,
    noise_variance: float,
    initial_gap: float,
    horizon: int,
    initial_batch: int | None = None,
) -> HybridPlan:
    """Return a plan with lr = 1/(2L), momentum 1 − 1/√(bK) and averaging γ = min(1, √2/(bK)^¼).

    The mean of E‖G‖² is at most 40·L·F₀/(γK) + 24·σ²/√(bK).

    Args:
        smoothness: L > 0 in mean square.
        noise_variance: σ² ≥ 0 of one sample.
        initial_gap: F₀ ≥ 0.
        horizon: K ≥ 1 steps.
        initial_batch: b, the number of samples in the first step; ⌈K^⅓⌉ by default, for the rate K^(−2/3).

    >>> found = hybrid_plan(smoothness=1.0, noise_variance=4.0, initial_gap=1.0, horizon=1000)
    >>> found.initial_batch, round(found.momentum, 3), round(found.averaging, 3), round(found.guarantee, 2)
    (10, 0.99, 0.141, 1.24)
    """
    L = checks.more_than(0, "smoothness", smoothness)
    variance = checks.nonnegative("noise_variance", noise_variance)
    gap = checks.nonnegative("initial_gap", initial_gap)
    K = steps(horizon)
    b = _cube_root(K) if initial_batch is None else checks.count("initial_batch", initial_batch, least=1)
    weight = 1 / math.sqrt(b * K)
    averaging = min(1.0, math.sqrt(2 * weight))
    bound = 40 * L * gap / (averaging * K) + 24 * variance * weight
    return HybridPlan(1 / (2 * L), 1 - weight, averaging, b, bound)


def _cube_root(K: int) -> int:
    """Return ⌈K^⅓⌉, free of the rounding errors of powers."""
    root = round(math.pow(K, 1 / 3))
    return root if root**3 >= K else root + 1


@dataclass(frozen=True)
class StormSchedule:
    """PStorm's rates for `ProxSTORM`, as a schedule for `RateScheduler`; needs neither horizon nor noise level.

    lr_k = (4^⅓/8L)/(k + 4)^⅓ and momentum 1 − β_k with β_k = (1 + 24·lr_k²L² − lr_{k+1}/lr_k)/(1 + 4·lr_k²L²), which
    weighs the gradient of step k + 1.

    Args:
        smoothness: L > 0 in mean square.

    >>> schedule = StormSchedule(smoothness=1.0)
    >>> schedule(0).lr, round(schedule(0).momentum, 3), round(schedule(10_000).momentum, 3)
    (0.125, 0.58, 0.998)
    """

    smoothness: float

    def __post_init__(self) -> None:
        checks.more_than(0, "smoothness", self.smoothness)
        require_usable(self, self(0))

    def lr(self, k: int) -> float:
        """Return lr_k."""
        return _times_smoothness(k) / self.smoothness

    def __call__(self, k: int) -> Rates:
        """Return lr_k and momentum 1 − β_k."""
        scaled = _times_smoothness(k)
        beta = (1 + 24 * scaled**2 - _times_smoothness(k + 1) / scaled) / (1 + 4 * scaled**2)
        return Rates(self.lr(k), 1 - beta)


def _times_smoothness(k: int) -> float:
    """Return lr_k·L."""
    return math.pow(4 / (k + 4), 1 / 3) / 8
