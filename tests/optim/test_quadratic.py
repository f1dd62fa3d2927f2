"""ProxSGD on f = L/2·‖x‖² with ψ = a/2·‖x‖², where everything has a closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import proxmo
from proxmo import theory

L, A, DIMENSION = 1.0, 20.0, 5


@pytest.mark.parametrize(("M", "gamma"), [(10.0, 1.0), (10.0, 0.1), (100.0, 0.01), (2.0, 0.5)])
def test_run_equals_the_recursion_in_numpy(M: float, gamma: float) -> None:
    """x⁺ = (M·x − m)/(M + a), m = (1−γ)m + γ(L·x + ξ), in numpy with the same noise."""
    noise = np.random.default_rng(0).standard_normal((300, DIMENSION))
    x = Parameter(torch.ones(DIMENSION, dtype=torch.float64))
    optimizer = proxmo.ProxSGD([x], lr=1 / M, momentum=1 - gamma, penalty=proxmo.SquaredL2(A))
    point = np.ones(DIMENSION)
    average = None
    for xi in noise:
        x.grad = L * x.detach() + torch.from_numpy(xi)
        optimizer.step()
        gradient = L * point + xi
        average = gradient if average is None else (1 - gamma) * average + gamma * gradient
        point = (M * point - average) / (M + A)
        np.testing.assert_allclose(x.detach().numpy(), point, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("M", "gamma", "curvature"),
    [(10.0, 1.0, 1e4), (10.0, 0.01, 1e4), (3.0, 0.3, 20.0), (50.0, 0.05, 2.0), (1.0, 0.5, 0.0)],
)
def test_long_run_mean_of_the_error_equals_the_closed_form(M: float, gamma: float, curvature: float) -> None:
    """The mean of ‖∇F‖² over many runs is the closed form, within four standard errors."""
    runs, sigma = 4000, 3.0
    generator = torch.Generator().manual_seed(5)
    x = Parameter(torch.zeros(runs, DIMENSION, dtype=torch.float64))
    optimizer = proxmo.ProxSGD([x], lr=1 / M, momentum=1 - gamma, penalty=proxmo.SquaredL2(curvature))
    memory = max(1 / gamma, M / (L + curvature))
    for _ in range(math.ceil(20 * memory)):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64) * sigma / math.sqrt(DIMENSION)
        x.grad = L * x.detach() + noise
        optimizer.step()
    errors = ((L + curvature) * x.detach()).square().sum(1)
    expected = theory.quadratic_floor(L, curvature, sigma**2, M=M, gamma=gamma)
    standard_error = float(errors.std()) / math.sqrt(runs)
    assert abs(float(errors.mean()) - expected) <= 4 * standard_error
    assert standard_error <= 0.02 * expected  # otherwise the assertion above would be weak


def test_momentum_goes_below_the_lower_bound_of_the_vanilla_method() -> None:
    """For large a, the vanilla method stays above σ²/4 for every M ≤ a; momentum goes far below it."""
    sigma, curvature = 5.0, 1e4
    vanilla = [theory.quadratic_floor(L, curvature, sigma**2, M=M) for M in (1, 10, 100, 1e3, 1e4)]
    assert min(vanilla) >= sigma**2 / 4
    assert theory.quadratic_floor(L, curvature, sigma**2, M=10, gamma=0.001) < sigma**2 / 1000
