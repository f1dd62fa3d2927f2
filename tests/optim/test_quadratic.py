"""On f = L/2·‖x‖² with ψ = a/2·‖x‖² everything is known in closed form: the strongest oracle for the method."""

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
def test_one_run_is_the_closed_recursion(M: float, gamma: float) -> None:
    """x⁺ = (M·x − m)/(M + a), m = (1−γ)m + γ(L·x + ξ), in numpy from the same noise."""
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
def test_monte_carlo_mean_is_the_floor(M: float, gamma: float, curvature: float) -> None:
    """The long-run mean of ‖∇F‖² over many seeds is the closed form, within its own standard error."""
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
    assert standard_error <= 0.02 * expected  # or the line above would say little


def test_momentum_beats_vanilla_where_no_step_size_can() -> None:
    """The lower bound: with a large, vanilla stays above σ²/4 for every M ≤ a; momentum goes below it."""
    sigma, curvature = 5.0, 1e4
    vanilla = [theory.quadratic_floor(L, curvature, sigma**2, M=M) for M in (1, 10, 100, 1e3, 1e4)]
    assert min(vanilla) >= sigma**2 / 4
    assert theory.quadratic_floor(L, curvature, sigma**2, M=10, gamma=0.001) < sigma**2 / 1000
