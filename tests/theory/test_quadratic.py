"""Closed forms on the quadratic against independent computations."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from proxmo import theory


@given(
    L=st.floats(0.1, 10),
    a=st.floats(0, 1e4),
    variance=st.floats(0.1, 100),
    excess=st.floats(0.1, 1e3),
    gamma=st.floats(0.01, 1),
)
def test_floor_is_the_fixed_point_of_the_second_moments(
    L: float, a: float, variance: float, excess: float, gamma: float
) -> None:
    """(x, m) follows a linear recursion whose stationary covariance solves a Lyapunov equation."""
    M = L / 2 + excess
    # m⁺ = (1−γ)m + γ(Lx + ξ), x⁺ = (Mx − m⁺)/(M + a), in one dimension, where ξ has the total variance
    new_m = np.array([gamma * L, 1 - gamma])
    new_x = (np.array([M, 0.0]) - new_m) / (M + a)
    move = np.stack([new_x, new_m])
    push = np.array([-gamma / (M + a), gamma])
    covariance = np.linalg.solve(np.eye(4) - np.kron(move, move), variance * np.kron(push, push)).reshape(2, 2)
    expected = (L + a) ** 2 * covariance[0, 0]
    assert theory.quadratic_floor(L, a, variance, M=M, gamma=gamma) == pytest.approx(expected, rel=1e-6)


def test_floor_without_momentum() -> None:
    for M in (1.0, 10.0, 1e4):
        assert theory.quadratic_floor(1.0, 1e4, 25.0, M=M) == pytest.approx((1 + 1e4) * 25 / (2 * M + 1e4 - 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"smoothness": 0.0}, "smoothness must be a finite number > 0, got 0.0"),
        ({"curvature": -1.0}, "curvature must be a finite number >= 0, got -1.0"),
        ({"noise_variance": -1.0}, "noise_variance must be a finite number >= 0, got -1.0"),
        ({"M": 0.5}, "M must be a finite number > 0.5, got 0.5"),
        ({"gamma": 0.0}, r"gamma must be a number in \(0, 1\], got 0.0"),
        ({"gamma": 1.1}, r"gamma must be a number in \(0, 1\], got 1.1"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    good = {"smoothness": 1.0, "curvature": 1.0, "noise_variance": 1.0, "M": 10.0, "gamma": 0.5}
    with pytest.raises(ValueError, match=message):
        theory.quadratic_floor(**{**good, **arguments})
