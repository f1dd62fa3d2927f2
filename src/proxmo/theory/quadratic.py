"""Closed forms on f = L/2·‖x‖², ψ = a/2·‖x‖² with additive noise, for exact tests of the methods.

On this problem (x, m) follows a linear recursion, and so do its second moments: expectations are known exactly at every
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

from proxmo import checks
from proxmo.theory.plans import Initial, Rates, steps


def quadratic_floor(
    smoothness: float, curvature: float, noise_variance: float, *, M: float, gamma: float = 1.0
) -> float:
    """Return the stationary mean of ‖∇F‖² of ProxSGD on f = L/2·‖x‖², ψ = a/2·‖x‖² with constant M and γ.

    It is γ(L+a)σ²((2−γ)M+a) / ((a+γM)((2−γ)(2M+a)−γL)). For γ = 1, the vanilla method, that is (L+a)σ²/(2M+a−L), close
    to σ² for every M much smaller than a: the method stalls at the level of the noise.

    Args:
        smoothness: L > 0.
        curvature: a ≥ 0, the strength of the penalty.
        noise_variance: σ² ≥ 0, the total variance E‖g − ∇f‖² of the (mini-batch) gradients.
        M: 1/lr > L/2, for stability.
        gamma: γ = 1 − momentum in (0, 1].

    >>> round(quadratic_floor(1.0, 1e4, 25.0, M=10.0), 2)
    24.96
    >>> round(quadratic_floor(1.0, 1e4, 25.0, M=10.0, gamma=0.01), 3)
    0.126
    """
    big_l = checks.more_than(0, "smoothness", smoothness)
    a = checks.nonnegative("curvature", curvature)
    variance = checks.nonnegative("noise_variance", noise_variance)
    m = checks.more_than(big_l / 2, "M", M)
    if not 0 < checks.number("gamma", gamma) <= 1:
        raise ValueError(f"gamma must be a number in (0, 1], got {gamma!r}")
    numerator = gamma * (big_l + a) * variance * ((2 - gamma) * m + a)
    return numerator / ((a + gamma * m) * ((2 - gamma) * (2 * m + a) - gamma * big_l))


class Moments(NamedTuple):
    """Exact expectations along a run; see `quadratic_moments`."""

    gradient: list[float]
    """E‖∇F(x_k)‖² for k = 0 … K."""
    objective: list[float]
    """E F(x_k) − F* for k = 0 … K."""
    variance: list[float]
    """Δ_k = E‖m_k − ∇f(x_k)‖² for k = 0 … K."""
    movement: list[float]
    """R_k = E‖x_{k+1} − x_k‖² for k = 0 … K − 1."""


def quadratic_moments(
    rates: Callable[[int], Rates],
    *,
    smoothness: float,
    curvature: float,
    noise_variance: float,
    start: float,
    horizon: int,
    initial: Initial = "gradient",
    batch: int = 1,
) -> Moments:
    """Return the exact second moments of ProxSGD on the quadratic, step by step.

    Args:
        rates: lr and momentum of each step, such as a `Plan`; step k uses the lr of k and the momentum of k − 1.
        smoothness: L > 0.
        curvature: a ≥ 0, the strength of the penalty.
        noise_variance: σ² ≥ 0.
        start: ‖x₀‖² ≥ 0.
        horizon: K ≥ 1, the number of steps.
        initial: m₀ = g₀, m₀ = 0 or m₀ = −∇ψ(x₀).
        batch: the number of samples in the first gradient.

    >>> moments = quadratic_moments(
    ...     lambda k: Rates(lr=0.1, momentum=0.9),
    ...     smoothness=1.0, curvature=1e4, noise_variance=25.0, start=0.0, horizon=200,
    ... )
    >>> round(moments.gradient[-1], 4), round(quadratic_floor(1.0, 1e4, 25.0, M=10.0, gamma=0.1), 4)
    (1.3157, 1.3157)
    """
    big_l = checks.more_than(0, "smoothness", smoothness)
    a = checks.nonnegative("curvature", curvature)
    variance = checks.nonnegative("noise_variance", noise_variance)
    xx = checks.nonnegative("start", start)
    if initial not in get_args(Initial):
        raise ValueError(f"initial must be one of {get_args(Initial)}, got {initial!r}")
    checks.count("batch", batch, least=1)
    if initial == "gradient":
        xm, mm = big_l * xx, big_l**2 * xx + variance / batch
    else:
        pull = 0.0 if initial == "zero" else a
        xm, mm = -pull * xx, pull**2 * xx
    moments = Moments([], [], [], [])

    def record() -> None:
        moments.gradient.append((big_l + a) ** 2 * xx)
        moments.objective.append((big_l + a) / 2 * xx)
        moments.variance.append(mm - 2 * big_l * xm + big_l**2 * xx)

    record()
    for k in range(steps(horizon)):
        M, gamma = 1 / rates(k).lr, 1 - rates(k).momentum
        # x⁺ = (M·x − m)/(M + a), then m⁺ = (1−γ)·m + γ·(L·x⁺ + ξ)
        next_xx = (M**2 * xx - 2 * M * xm + mm) / (M + a) ** 2
        moments.movement.append(next_xx - 2 * (M * xx - xm) / (M + a) + xx)
        next_x_m = (M * xm - mm) / (M + a)
        xx, xm, mm = (
            next_xx,
            (1 - gamma) * next_x_m + gamma * big_l * next_xx,
            (1 - gamma) ** 2 * mm
            + 2 * (1 - gamma) * gamma * big_l * next_x_m
            + gamma**2 * (big_l**2 * next_xx + variance),
        )
        record()
    return moments
