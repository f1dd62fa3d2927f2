"""InexactProxSGD: its limit (ProxSGD), the stopping criterion, the fallback, precision and the bounds of theory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import proxmo
from optim.smooth_problem import DOUBLE, noisy_f, smooth_psi, start
from proxmo import InexactProxSGD, InnerSGD, theory
from proxmo.experiments.problems import RobustRegression


@pytest.mark.parametrize("penalty", [proxmo.SquaredL2(2.0), proxmo.Huber(1.5, 0.7)], ids=str)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"initial": "zero"}, {"maximize": True}], ids=str)
def test_many_inner_steps_equal_prox_sgd(penalty: proxmo.Penalty, options: dict[str, Any]) -> None:
    x, y = start(), start()
    exact = proxmo.ProxSGD([x], **{"lr": 0.2, "momentum": 0.8, "penalty": penalty, **options})
    inexact = InexactProxSGD([y], **{"lr": 0.2, "momentum": 0.8, "inner": InnerSGD(200, lr=0.15), **options})
    for k in range(10):
        exact.zero_grad()
        exact.step(noisy_f(x, k))
        loss = inexact.step(noisy_f(y, k), smooth_psi(y, penalty))
        assert isinstance(loss, float)
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(y.grad, x.grad)  # of f at the previous point
    assert inexact.param_groups[0]["psi_evaluations"] == 10 * 201
    assert inexact.report is not None
    assert inexact.report.steps == 200


def test_inner_steps_equal_a_computation_by_hand() -> None:
    """The inner gradient is m + ∇ψ + M·(x − x_k), with an M for each parameter group."""
    a, b = Parameter(torch.tensor([3.0], dtype=DOUBLE)), Parameter(torch.tensor([-1.0], dtype=DOUBLE))
    optimizer = InexactProxSGD(
        [{"params": [a]}, {"params": [b], "lr": 0.25}], lr=0.5, momentum=0.5, inner=InnerSGD(2, lr=0.1)
    )

    def f() -> float:
        loss = (a * 2 + b * 3).sum()
        loss.backward()
        return loss.item()

    def psi() -> None:
        ((a - b).square().sum() / 2).backward()

    x, y, ma, mb = 3.0, -1.0, 2.0, 3.0
    for _ in range(3):  # the average of constant gradients is the gradient
        p, q = x, y
        for _ in range(2):
            ga, gb = ma + (p - q) + (p - x) / 0.5, mb - (p - q) + (q - y) / 0.25
            p, q = p - 0.1 * ga, q - 0.1 * gb
        ga, gb = ma + (p - q) + (p - x) / 0.5, mb - (p - q) + (q - y) / 0.25
        bound = ((p - x) / 0.5) ** 2 / 16 + ((q - y) / 0.25) ** 2 / 16
        x, y = p, q
        optimizer.step(f, psi)
        assert (a.item(), b.item()) == pytest.approx((x, y), rel=1e-12)
        report = optimizer.report
        assert report is not None
        assert report.gradient_norm == pytest.approx(ga**2 + gb**2, rel=1e-12)
        assert report.bound == pytest.approx(bound, rel=1e-12)
        assert report.met == (report.gradient_norm <= report.bound)
        assert not report.fell_back


@pytest.mark.parametrize("S", [0.0, 1e-6, 1e-2])
def test_inner_solver_stops_when_the_criterion_is_met(S: float) -> None:
    penalty = proxmo.Huber(1.5, 0.7)
    x = start()
    inner = InnerSGD(500, lr=1 / (1.5 + 5), S=S)  # 1/(L_ψ + M)
    optimizer = InexactProxSGD([x], lr=0.2, momentum=0.8, inner=inner)
    steps = []
    for k in range(20):
        before, average = x.detach().clone(), copy.deepcopy(optimizer.state.get(x))
        optimizer.step(noisy_f(x, k), smooth_psi(x, penalty))
        report = optimizer.report
        assert report is not None
        assert report.met
        assert 0 < report.steps < 500
        steps.append(report.steps)
        # recompute the criterion with autograd of Ω at the final point
        m = optimizer.state[x]["momentum_buffer"]
        assert average is None or not torch.equal(m, average["momentum_buffer"])
        point = x.detach().clone().requires_grad_()
        omega = (m * point).sum() + penalty.value(point) + 2.5 * (point - before).square().sum()
        (gradient,) = torch.autograd.grad(omega, point)
        bound = 25 / 16 * float((x.detach() - before).square().sum()) + S
        assert report.gradient_norm == pytest.approx(float(gradient.square().sum()), rel=1e-9)
        assert report.bound == pytest.approx(bound, rel=1e-9)
        assert report.gradient_norm <= report.bound
    if S == 0:  # far fewer than solving the subproblem takes
        assert max(steps) <= theory.inner_steps(penalty_smoothness=1.5, M=5.0)


def test_no_inner_step_is_taken_if_the_start_meets_the_criterion() -> None:
    x = Parameter(torch.zeros(2))
    optimizer = InexactProxSGD([x], lr=0.1, inner=InnerSGD(5, lr=0.01, S=100.0))
    optimizer.step(noisy_f(x, 0), smooth_psi(x, proxmo.SquaredL2(1.0)))
    assert torch.equal(x, torch.zeros(2))
    assert optimizer.report == (0, pytest.approx(optimizer.report.gradient_norm), 100.0, True, False)  # type: ignore[union-attr]
    assert optimizer.param_groups[0]["psi_evaluations"] == 1


def test_report_says_if_too_few_steps_were_allowed_to_meet_the_criterion() -> None:
    x = start()
    optimizer = InexactProxSGD([x], lr=0.2, inner=InnerSGD(1, lr=0.001, S=0.0))
    optimizer.step(noisy_f(x, 0), smooth_psi(x, proxmo.SquaredL2(1.0)))
    assert optimizer.report is not None
    assert optimizer.report.steps == 1
    assert not optimizer.report.met
    assert optimizer.report.gradient_norm > optimizer.report.bound


@pytest.mark.parametrize("with_value", [True, False])
def test_step_that_increases_the_objective_is_undone_if_psi_returns_values(with_value: bool) -> None:
    """The inner lr is too large for ψ: the step is undone and counted if psi_closure returns values, and only then."""
    x = start()
    before = x.detach().clone()
    optimizer = InexactProxSGD([x], lr=1.0, inner=InnerSGD(3, lr=0.5))
    psi = smooth_psi(x, proxmo.SquaredL2(10.0), with_value=with_value)
    for k in range(2):
        optimizer.step(noisy_f(x, k), psi)
    assert optimizer.report is not None
    assert optimizer.report.fell_back == with_value
    assert optimizer.param_groups[0]["fallbacks"] == (2 if with_value else 0)
    assert torch.equal(x, before) == with_value
    if with_value:  # the report describes the restored point: ∇Ω(x_k) = m + ∇ψ(x_k), and x − x_k = 0
        expected = float((optimizer.state[x]["momentum_buffer"] + 10 * before).square().sum())
        assert optimizer.report.gradient_norm == pytest.approx(expected)
        assert optimizer.report.bound == 0


def test_rounding_of_psi_does_not_trigger_the_fallback() -> None:
    """In float32 with a large ψ, the last decreases are below its rounding; the run must converge all the same."""
    torch.manual_seed(0)
    matrix, shift = torch.randn(40, 20), torch.randn(40) * 10
    x = Parameter(torch.zeros(20))

    def f() -> None:
        (0.5 * x.square().sum()).backward()

    def psi() -> float:
        value = (matrix @ x - shift).square().sum() / 40 + 400
        value.backward()
        return value.item()

    optimizer = InexactProxSGD([x], lr=0.2, momentum=0.0, inner=InnerSGD(20, lr=0.1))
    for _ in range(300):
        optimizer.step(f, psi)
    exact = torch.linalg.solve(matrix.mT @ matrix / 20 + torch.eye(20), matrix.mT @ shift / 20)
    torch.testing.assert_close(x.detach(), exact, rtol=0, atol=1e-4)
    assert optimizer.param_groups[0]["fallbacks"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_does_not_lose_small_inner_steps(dtype: torch.dtype) -> None:
    def run(kind: torch.dtype) -> float:
        x = Parameter(torch.full((2,), 3.0, dtype=kind))
        optimizer = InexactProxSGD([x], lr=0.02, momentum=0.0, inner=InnerSGD(50, lr=0.002))

        def f() -> None:
            x.grad = torch.ones_like(x)

        def psi() -> None:
            x.grad = x.detach().clone()

        for _ in range(50):
            optimizer.step(f, psi)
        assert x.dtype == kind
        return x[0].item()

    assert run(dtype) == pytest.approx(run(torch.float32), abs=0.05)


def test_inner_lr_follows_a_scheduled_lr_that_falls_below_it() -> None:
    """Cosine annealing takes lr below the inner lr without triggering the fallback."""
    x = start()
    optimizer = InexactProxSGD([x], lr=0.1, inner=InnerSGD(20, lr=0.02))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for k in range(20):
        optimizer.step(noisy_f(x, k), smooth_psi(x, proxmo.SquaredL2(1.0)))
        scheduler.step()
        assert optimizer.report is not None
        assert not optimizer.report.fell_back
    assert x.isfinite().all()


def test_changed_lr_reaches_the_subproblem() -> None:
    x, y = start(), start()
    exact = proxmo.ProxSGD([x], lr=0.2, penalty=proxmo.SquaredL2(1.0))
    inexact = InexactProxSGD([y], lr=torch.tensor(0.2), inner=InnerSGD(400, lr=0.05))
    for k in range(6):
        exact.zero_grad()
        exact.step(noisy_f(x, k))
        inexact.step(noisy_f(y, k), smooth_psi(y, proxmo.SquaredL2(1.0)))
        exact.param_groups[0]["lr"] *= 0.8
        inexact.param_groups[0]["lr"] = inexact.param_groups[0]["lr"] * 0.8
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("regime", ["paper_inexact", "convex_inexact", "monotone_inexact"])
def test_bounds_of_the_inexact_regimes_hold(regime: str) -> None:
    """A batch of runs is one problem whose F, σ² and ‖∇F‖² are the sums over the runs."""
    runs, horizon, S = 20, 150, 0.02
    problem = RobustRegression("smooth", "l1", batch=8)
    psi = proxmo.Huber(0.5, 0.1)
    x = Parameter(problem.start(runs))
    gap = runs * (float(problem.objective(problem.start(1))))  # F ≥ 0, and ψ(0) = 0
    known = {"smoothness": problem.smoothness, "noise_variance": runs * problem.noise_variance}
    plan = theory.plan(regime, **known, initial_gap=gap, horizon=horizon)
    inner = InnerSGD(200, lr=1 / (plan.M + 0.5), S=S)
    optimizer = InexactProxSGD([x], lr=plan.lr, momentum=plan.momentum, inner=inner)
    generator = torch.Generator().manual_seed(0)
    total, inner_steps = 0.0, 0
    for _ in range(horizon):
        sample = problem.sample(runs, generator)

        def f(sample: Tensor = sample) -> float:
            x.grad = problem.gradient(x.detach(), sample)
            return 0.0

        optimizer.step(f, smooth_psi(x, psi))
        assert optimizer.report is not None
        assert optimizer.report.met
        assert not optimizer.report.fell_back
        inner_steps += optimizer.report.steps
        point = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(psi.value(point), point)
        total += float((problem.full_gradient(x.detach()) + slope).square().sum())
    bound = theory.guarantee(plan.M, regime, **known, phi0=plan.phi0, horizon=horizon, inexactness=S)
    assert 0 < total / horizon <= bound
    assert inner_steps > horizon / 10  # S alone does not satisfy the criterion
