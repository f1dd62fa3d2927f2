"""Estimated constants against known ones, on a noisy quadratic, a regression and a network."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import proxmo
from proxmo import theory
from proxmo.experiments.problems import RobustRegression

DOUBLE = torch.float64


def quadratic(curvatures: list[float], sigma: float, samples: int) -> tuple[Tensor, object]:
    h = torch.tensor(curvatures, dtype=DOUBLE)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(samples, len(h), generator=generator, dtype=DOUBLE) * sigma / math.sqrt(len(h))
    x = torch.ones(len(h), dtype=DOUBLE, requires_grad=True)
    return x, lambda k: (h * x.square()).sum() / 2 + (noise[k] * x).sum()


def test_constants_of_a_quadratic() -> None:
    x, closure = quadratic([1.0, 3.0, 10.0], sigma=4.0, samples=400)
    found = proxmo.estimate_constants(closure, [x], samples=400)  # type: ignore[call-overload]
    assert found.smoothness == pytest.approx(10.0, rel=1e-2)
    assert found.noise_variance == pytest.approx(16.0, rel=0.2)
    low, high = found.noise_interval
    assert low < found.noise_variance < high
    assert found.initial_gap == pytest.approx(7.0, abs=1.0)


def test_confidence_interval_covers_the_true_variance() -> None:
    covered = 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        noise = torch.randn(16, 5, generator=generator, dtype=DOUBLE)
        x = torch.zeros(5, dtype=DOUBLE, requires_grad=True)
        found = proxmo.estimate_constants(
            lambda k, x=x, noise=noise: x.square().sum() + (noise[k] * x).sum(), [x], samples=16
        )  # type: ignore[call-overload]
        covered += found.noise_interval[0] <= 5.0 <= found.noise_interval[1]
    assert 0.88 <= covered / 50 <= 0.99


def test_noise_of_the_curvature_cancels() -> None:
    """With batches of one, a single secant measures the curvature of that sample, up to five times that of f."""
    problem = RobustRegression("regression", "l1", batch=1)
    generator = torch.Generator().manual_seed(0)
    batches = [problem.sample(1, generator) for _ in range(64)]
    x = problem.start(1).requires_grad_()
    inputs, targets = problem._inputs, problem._targets

    def mean_loss(point: Tensor, batch: Tensor) -> Tensor:
        residual = inputs[batch] @ point.flatten() - targets[batch]
        return (2 * residual.square() / (4 + residual.square())).mean()

    everything = torch.arange(500)
    hessian = torch.autograd.functional.hessian(lambda u: mean_loss(u, everything), torch.zeros(20, dtype=DOUBLE))
    truth = float(torch.linalg.matrix_norm(hessian, 2))
    found = proxmo.estimate_constants(lambda k: mean_loss(x, batches[k]), [x], samples=64)
    assert 0.5 * truth < found.smoothness < 2 * truth
    alone = [proxmo.estimate_constants(lambda k, b=b: mean_loss(x, b), [x], samples=2) for b in batches]
    assert max(one.smoothness for one in alone) > 4 * truth  # single samples overestimate it
    assert found.noise_variance < problem.noise_variance


def network() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return net, [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]


def test_estimates_leave_a_network_unchanged() -> None:
    net, loader = network()
    net[0].weight.grad = torch.ones(8, 4)  # type: ignore[union-attr, index]
    before = copy.deepcopy(net.state_dict())
    found = proxmo.estimate_constants(net, nn.functional.cross_entropy, loader, penalty=proxmo.L1(0.01))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(net[0].weight.grad, torch.ones(8, 4))  # type: ignore[union-attr, index]
    assert found.samples == 5
    assert found.smoothness > 0
    penalty = sum(0.01 * float(p.detach().abs().sum()) for p in net.parameters())
    assert found.initial_gap == pytest.approx(penalty + 1.2, abs=0.4)


def test_dropout_is_not_mistaken_for_curvature() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3)]
    loader = [(torch.randn(64, 4), torch.randint(3, (64,))) for _ in range(16)]
    plain = proxmo.estimate_constants(nn.Sequential(*layers), nn.functional.cross_entropy, loader)
    state = torch.get_rng_state()
    dropout = nn.Sequential(layers[0], layers[1], nn.Dropout(0.2), layers[2])
    found = proxmo.estimate_constants(dropout, nn.functional.cross_entropy, loader)
    assert 0.5 * plain.smoothness < found.smoothness < 2 * plain.smoothness
    assert torch.equal(torch.get_rng_state(), state)


def test_curvature_orthogonal_to_the_gradient_is_found() -> None:
    h = torch.tensor([100.0, 1.0], dtype=DOUBLE)
    x = torch.tensor([0.0, 1.0], dtype=DOUBLE, requires_grad=True)
    found = proxmo.estimate_constants(lambda k: (h * x.square()).sum() / 2, [x])
    assert found.smoothness == pytest.approx(100.0, rel=1e-3)


def test_smoothness_in_half_precision() -> None:
    x = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
    found = proxmo.estimate_constants(lambda k: 5 * x.float().square().sum() / 2, [x])
    assert found.smoothness == pytest.approx(5.0, rel=0.1)


def test_estimates_are_arguments_of_a_plan() -> None:
    net, loader = network()
    found = proxmo.estimate_constants(net, nn.functional.cross_entropy, loader)
    assert theory.plan(**found).horizon == 10_000
    plan = theory.plan("monotone", **found, horizon=500)
    assert 3 * found.smoothness * (1 - 1e-12) <= plan.M
    assert set(found) == {"smoothness", "noise_variance", "initial_gap"}
    with pytest.raises(KeyError):
        found["samples"]
    assert "noise variance σ²" in str(found)


def test_invalid_arguments_are_refused() -> None:
    net, loader = network()
    with pytest.raises(ValueError, match="samples must be an integer >= 2, got 1"):
        proxmo.estimate_constants(net, nn.functional.cross_entropy, loader, samples=1)
    with pytest.raises(ValueError, match="loader must yield at least two batches, got 1"):
        proxmo.estimate_constants(net, nn.functional.cross_entropy, loader[:1])
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(FloatingPointError, match="the loss on sample 0 is not finite"):
        proxmo.estimate_constants(lambda k: (x * math.inf).sum(), [x])
    assert torch.equal(x, torch.ones(2))
