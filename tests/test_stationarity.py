"""dist(0, ∂F): closed forms, the limit of the gradient mapping, certificates, and the Moreau envelope."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import proxmo
from proxmo import criteria

DOUBLE = torch.float64
KNOWN = [
    proxmo.L1(0.7),
    proxmo.SquaredL2(0.7),
    proxmo.ElasticNet(0.5, 0.4),
    proxmo.Huber(0.8, 0.6),
    proxmo.GroupL2(0.9),
    proxmo.GroupL2(0.9, dim=1),
    proxmo.GroupLInf(0.9),
    proxmo.GroupLInf(0.9, dim=None),
    proxmo.SparseGroup(0.4, 0.5),
    proxmo.Box(-0.5, 0.8),
    proxmo.NonNegative(),
    proxmo.LInfBall(0.6),
    proxmo.L1Ball(1.5),
    proxmo.L1Ball(0.8, dim=0),
    proxmo.L2Ball(1.2),
    proxmo.L2Ball(0.5, dim=0),
    proxmo.Simplex(),
    proxmo.Simplex(2.0, dim=0),
]


def points(penalty: proxmo.Penalty) -> list[Tensor]:
    """Return points at kinks and elsewhere: results of prox steps, and zero."""
    generator = torch.Generator().manual_seed(0)
    found = [
        penalty.prox(scale * torch.randn(4, 5, generator=generator, dtype=DOUBLE), step)
        for scale in (0.05, 0.3, 1.0, 4.0)
        for step in (0.3, 1.0)
    ]
    return [*found, penalty.prox(torch.zeros(4, 5, dtype=DOUBLE), 1.0)]


@pytest.mark.parametrize("penalty", KNOWN, ids=str)
def test_nearest_subgradient_is_the_limit_of_the_gradient_mapping(penalty: proxmo.Penalty) -> None:
    """(x − prox(x + t·v))/t → P(v) − v as t → 0, and its norm grows on the way there."""
    generator = torch.Generator().manual_seed(1)
    for x in points(penalty):
        for scale in (0.1, 1.0, 3.0):
            v = scale * torch.randn(x.shape, generator=generator, dtype=DOUBLE)
            residual = penalty.nearest_subgradient(x, v) - v
            limit = criteria.gradient_mapping(x, -v, penalty, 1e-8)
            torch.testing.assert_close(residual, limit, rtol=0, atol=1e-5)
            for lr in (0.01, 0.1, 1.0):
                assert criteria.gradient_mapping(x, -v, penalty, lr).norm() <= residual.norm() * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("penalty", KNOWN, ids=str)
def test_nearest_subgradient_is_a_subgradient(penalty: proxmo.Penalty) -> None:
    generator = torch.Generator().manual_seed(2)
    for x in points(penalty):
        s = penalty.nearest_subgradient(x, torch.randn(x.shape, generator=generator, dtype=DOUBLE))
        for _ in range(10):
            u = penalty.prox(2 * torch.randn(x.shape, generator=generator, dtype=DOUBLE), 0.1)
            assert penalty.value(u) >= penalty.value(x) + (s * (u - x)).sum() - 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("penalty", KNOWN, ids=str)
def test_certificate_is_never_below_the_distance(penalty: proxmo.Penalty, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = Parameter(torch.randn(4, 5, generator=generator, dtype=dtype))
    optimizer = proxmo.ProxSGD([x], lr=0.3, momentum=0.5, penalty=penalty)
    optimizer.certify = True
    below = 0
    for _ in range(20):
        x.grad = x.detach() + 0.5 * torch.randn(4, 5, generator=generator, dtype=dtype)
        optimizer.step()
        x.grad = x.detach() - 1  # ∇f for f = ‖x − 1‖²/2
        certified, least = criteria.gradient_norm(optimizer), criteria.stationarity(optimizer)
        assert least <= certified * (1 + 1e-4 if dtype == torch.float32 else 1 + 1e-9) + 1e-9
        below += least < 0.9 * certified
    assert below or isinstance(penalty, (proxmo.SquaredL2, proxmo.Huber))  # else nothing would be gained


def test_distance_is_zero_at_a_minimum_only() -> None:
    """min ½‖x − b‖² + s‖x‖₁ has the solution soft(b, s)."""
    b = torch.tensor([2.0, -0.3, 0.1, -5.0], dtype=DOUBLE)
    x = Parameter(proxmo.L1(0.5).prox(b, 1.0))
    optimizer = proxmo.ProxSGD([x], penalty=proxmo.L1(0.5))
    x.grad = x.detach() - b
    assert criteria.stationarity(optimizer) == 0
    with torch.no_grad():
        x[0] += 0.25
    x.grad = x.detach() - b
    assert criteria.stationarity(optimizer) == pytest.approx(0.0625)


@pytest.mark.parametrize("ball", [proxmo.L2Ball(0.7, dim=0), proxmo.L1Ball(5.0, dim=0)], ids=str)
def test_projected_points_in_float32_are_on_the_boundary(ball: proxmo.Penalty) -> None:
    generator = torch.Generator().manual_seed(5)
    target = 5 * torch.randn(1000, 10, generator=generator)
    x = Parameter(ball.prox(target, 1.0))
    x.grad = x.detach() - target  # the solution of min ½‖x − target‖² in the ball
    assert criteria.stationarity(proxmo.ProxSGD([x], penalty=ball)) < 1e-6 * target.square().sum()


def test_nan_does_not_go_unseen() -> None:
    x = Parameter(torch.tensor([math.nan, 1.0]))
    x.grad = torch.ones(2)
    for penalty in (proxmo.L1(1.0), proxmo.Box(0.0, 2.0), proxmo.Huber(1.0, 1.0)):
        assert math.isnan(criteria.stationarity(proxmo.ProxSGD([x], penalty=penalty)))


def test_units_that_span_parameters() -> None:
    """A unit is a row of the weight with its bias; what units leave out counts as not penalised."""
    weight = Parameter(torch.tensor([[0.0, 0.0], [3.0, 0.0]], dtype=DOUBLE))
    bias, other = Parameter(torch.tensor([0.0, 4.0], dtype=DOUBLE)), Parameter(torch.ones(1, dtype=DOUBLE))
    units = (((0, 0, None), (1, 0, None)),)
    optimizer = proxmo.ProxSGD([{"params": [weight, bias, other], "units": units, "penalty": proxmo.GroupL2(5.0)}])
    weight.grad = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=DOUBLE)
    bias.grad, other.grad = torch.tensor([12.0, -4.0], dtype=DOUBLE), torch.tensor([2.0], dtype=DOUBLE)
    # the zero unit: (13 − 5)²; the other one: (0, 1, −4) + 5·(3, 0, 4)/5; what is left out: 2²
    assert criteria.stationarity(optimizer) == pytest.approx(64 + 9 + 1 + 0 + 4)


def test_small_gradients_of_what_units_leave_out_count_beside_large_ones() -> None:
    weight, other = Parameter(torch.zeros(1, 1)), Parameter(torch.ones(1))
    units = (((0, 0, None),),)
    optimizer = proxmo.ProxSGD([{"params": [weight, other], "units": units, "penalty": proxmo.GroupL2(2e9)}])
    weight.grad, other.grad = torch.full((1, 1), 1e9), torch.tensor([0.5])
    assert criteria.stationarity(optimizer) == 0.25


def test_unknown_subdifferentials_are_refused() -> None:
    x = Parameter(torch.zeros(3, 3))
    x.grad = torch.ones(3, 3)
    for penalty in (proxmo.MCP(0.1), proxmo.Nuclear(0.1), proxmo.TopK(2)):
        with pytest.raises(NotImplementedError, match=r"the subdifferential of .* is not known"):
            criteria.stationarity(proxmo.ProxSGD([x], penalty=penalty))
    with pytest.raises(ValueError, match="for minimisation"):
        criteria.stationarity(proxmo.ProxSGD([x], maximize=True))
    with pytest.raises(ValueError, match=r"x must be in the set of Box\(low=1.0, high=2.0\)"):
        proxmo.Box(1.0, 2.0).nearest_subgradient(torch.zeros(3), torch.zeros(3))
    large = torch.full((1,), 1e30)  # its square is beyond float32
    assert proxmo.SquaredL2(1.0).nearest_subgradient(large, large) == pytest.approx(1e30, rel=1e-6)
    with pytest.raises(TypeError, match="v must be a tensor, got list"):
        proxmo.L1(1.0).nearest_subgradient(torch.zeros(1), [0.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"v must have the shape of x, \(3,\), got \(2,\)"):
        proxmo.L1(1.0).nearest_subgradient(torch.zeros(3), torch.zeros(2))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "convex": lambda u: u,
    "concave": lambda u: -u,
    "saddle": lambda u: u * torch.tensor([1.0, -1.0, 0.3, -0.2], dtype=u.dtype),
    "Huber-like": lambda u: u.clamp(-1, 1),
    "hill": lambda u: 1 - (u - 1).abs(),
    "wave": torch.sin,
}
"""Gradients that are 1-Lipschitz."""


def ratios(gradient: Callable[[Tensor], Tensor], penalty: proxmo.Penalty | None) -> list[float]:
    """Return ‖gradient mapping‖/‖Moreau gradient‖ with M = ρ = 1 and λ = 1/(2ρ), at many points."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for scale in (0.1, 0.5, 1.0, 2.0, 5.0):
        x = scale * torch.randn(4, generator=generator, dtype=DOUBLE)
        mapping = criteria.gradient_mapping(x, gradient(x), penalty, 1.0).norm()
        moreau = criteria.moreau_gradient(x, gradient, penalty, smoothness=1.0, tolerance=1e-11).norm()
        if moreau > 1e-7:
            found.append(float(mapping / moreau))
    return found


def test_mapping_and_moreau_gradient_are_within_the_constants_of_the_appendix() -> None:
    """¼·‖∇F_{1/2ρ}‖ ≤ ‖P‖ ≤ 3/2·(1 + 1/√2)·‖∇F_{1/2ρ}‖, and both are tight up to a factor of 2."""
    penalties = [None, proxmo.L1(0.3), proxmo.SquaredL2(5.0), proxmo.GroupLInf(0.5, dim=None), proxmo.L2Ball(1.0)]
    found = [one for gradient in FUNCTIONS.values() for penalty in penalties for one in ratios(gradient, penalty)]
    assert len(found) > 100
    assert 1 / 4 <= min(found) <= 0.5 + 1e-6  # ½ for a concave quadratic without ψ
    assert 1.5 - 1e-6 <= max(found) <= 1.5 * (1 + 1 / math.sqrt(2))  # 3/2 for a convex one
