"""What theory says about lr and momentum: pure functions of floats.

Here as in the paper M = 1/lr and γ = 1 − momentum.
"""

from __future__ import annotations

from proxmo import checks


def quadratic_floor(
    smoothness: float, curvature: float, noise_variance: float, *, M: float, gamma: float = 1.0
) -> float:
    """The stationary mean of ‖∇F‖² when ProxSGD runs forever on f = L/2·‖x‖², ψ = a/2·‖x‖² with constant M and γ.

    γ(L+a)σ²((2−γ)M+a) / ((a+γM)((2−γ)(2M+a)−γL)); for γ = 1, the vanilla method, (L+a)σ²/(2M+a−L), which does not
    go to zero with any M once a is large: the method stalls at the level of the noise.

    Args:
        smoothness: L > 0.
        curvature: a ≥ 0, the strength of the penalty.
        noise_variance: σ² ≥ 0, the total variance E‖g − ∇f‖² of the gradients (of the mini-batch, if there is one).
        M: 1/lr > L/2, so that the method is stable.
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
