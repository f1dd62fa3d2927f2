"""Plans of the variance-reduced methods: formulas, the inequalities behind them, and arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch

import proxmo
from proxmo import theory
from proxmo.experiments.problems import RobustRegression


def test_spiderboost_plan_is_that_of_its_paper() -> None:
    """η = 1/(2L), |S| = q = √n."""
    plan = theory.spiderboost_plan(smoothness=4.0, initial_gap=3.0, horizon=100, large_batch=400, noise_variance=2.0)
    assert plan == (1 / 8, 20, 20, 400, 40 * 4 * 3 / 100 + 12 * 2 / 400)
    for large, root in ((1, 1), (2, 2), (401, 21), (10**12, 10**6), (10**12 + 1, 10**6 + 1)):
        found = theory.spiderboost_plan(smoothness=1.0, initial_gap=1.0, horizon=1, large_batch=large)
        assert found.period == found.batch == root


def test_hybrid_plan_is_that_of_its_paper() -> None:
    """β = 1 − 1/√(b̃(m + 1)), with m + 1 = K steps."""
    plan = theory.hybrid_plan(smoothness=4.0, noise_variance=2.0, initial_gap=3.0, horizon=1000, initial_batch=40)
    assert plan.momentum == pytest.approx(1 - 1 / 200)
    assert plan.averaging == pytest.approx(0.1)
    assert plan.lr == 1 / 8
    assert plan.guarantee == pytest.approx(40 * 4 * 3 / (0.1 * 1000) + 24 * 2 / 200)
    for horizon, root in ((1, 1), (8, 2), (9, 3), (1000, 10), (1001, 11)):
        found = theory.hybrid_plan(smoothness=1.0, noise_variance=1.0, initial_gap=1.0, horizon=horizon)
        assert found.initial_batch == root
        assert 0 <= found.momentum < 1
        assert 0 < found.averaging <= 1


def test_hybrid_guarantee_falls_as_k_to_the_minus_two_thirds() -> None:
    """Eight times the steps give four times the accuracy."""
    known = {"smoothness": 1.0, "noise_variance": 1.0, "initial_gap": 1.0}
    one, other = (theory.hybrid_plan(**known, horizon=10**9 * factor).guarantee for factor in (1, 8))
    assert one / other == pytest.approx(4, rel=1e-3)


def test_storm_schedule_is_that_of_its_paper() -> None:
    schedule = theory.StormSchedule(smoothness=2.0)
    for k in (0, 1, 10, 10**6):
        lr = 4 ** (1 / 3) / 16 / (k + 4) ** (1 / 3)
        following = 4 ** (1 / 3) / 16 / (k + 5) ** (1 / 3)
        beta = (1 + 24 * lr**2 * 4 - following / lr) / (1 + 4 * lr**2 * 4)
        assert schedule(k).lr == pytest.approx(lr, rel=1e-13)
        assert schedule(k).momentum == pytest.approx(1 - beta, rel=1e-13)
        assert 0 < beta < 1


def test_descent_of_one_step() -> None:
    """F⁺ − F ≤ γ<−e, r> − (γ/η − Lγ²/2)r² is at most (γη/2)e² − (γ/2η)(1 − γLη)r²: they differ by a square."""
    gamma, eta, L, e, r = sympy.symbols("gamma eta L e r", positive=True)
    worst = gamma * e * r - (gamma / eta - L * gamma**2 / 2) * r**2  # <−e, r> is at most |e||r|
    claimed = gamma * eta / 2 * e**2 - gamma / (2 * eta) * (1 - gamma * L * eta) * r**2
    assert sympy.simplify(claimed - worst - gamma / (2 * eta) * (eta * e - r) ** 2) == 0


def test_inequalities_give_the_constants_of_the_guarantees() -> None:
    """With η = 1/(2L): Σ‖G‖² ≤ 2Σr²/η² + 2Σe², Σe² ≤ L²Σr² + noise and the descent give 40·L·F₀/γ + 12·noise."""
    gamma, L, gap, noise, R = sympy.symbols("gamma L gap noise R", positive=True)
    eta = 1 / (2 * L)
    errors = L**2 * R + noise
    # a lower bound on the descent for γ ≤ 1, since (γ/2η)(1 − γ/2) ≥ γL/2
    descent = gamma * L / 2 * R - gamma * eta / 2 * errors
    (moves,) = sympy.solve(descent - gap, R)
    total = (2 * R / eta**2 + 2 * errors).subs(R, moves)
    assert sympy.simplify(total - (40 * L / gamma * gap + 12 * noise)) == 0


def test_simulated_error_of_the_hybrid_estimate_satisfies_its_bound() -> None:
    """E‖e⁺‖² ≤ β²E‖e‖² + β²L²·‖x⁺ − x‖² + (1 − β)²σ², with the mean-square L of the problem."""
    problem = RobustRegression("error", "l1", batch=1)
    runs, beta = 20_000, 0.7
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 5, generator=generator, dtype=torch.float64)
    y = x + 0.3 * torch.randn(1, 4, 5, generator=generator, dtype=torch.float64)
    here, there = x.expand(runs, 4, 5), y.expand(runs, 4, 5)
    v = problem.gradient(here, problem.sample(runs, generator))
    error = (v - problem.full_gradient(x)).square().flatten(1).sum(1).mean()
    sample, other = problem.sample(runs, generator), problem.sample(runs, generator)
    moved = beta * (v + problem.gradient(there, sample) - problem.gradient(here, sample))
    moved += (1 - beta) * problem.gradient(there, other)
    found = (moved - problem.full_gradient(y)).square().flatten(1).sum(1).mean()
    change = beta**2 * problem.mean_square_smoothness**2 * (y - x).square().sum()
    assert found <= beta**2 * error + change + (1 - beta) ** 2 * problem.noise_variance
    assert found >= beta**2 * error  # the bound is not vacuous


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.spiderboost_plan(smoothness=0, initial_gap=1, horizon=1, large_batch=1), "smoothness must be"),
        (lambda: theory.spiderboost_plan(smoothness=1, initial_gap=-1, horizon=1, large_batch=1), "initial_gap must"),
        (lambda: theory.spiderboost_plan(smoothness=1, initial_gap=1, horizon=0, large_batch=1), "horizon must be"),
        (lambda: theory.spiderboost_plan(smoothness=1, initial_gap=1, horizon=1, large_batch=0), "large_batch must be"),
        (
            lambda: theory.hybrid_plan(smoothness=1, noise_variance=-1, initial_gap=1, horizon=1),
            "noise_variance must be",
        ),
        (
            lambda: theory.hybrid_plan(smoothness=1, noise_variance=1, initial_gap=1, horizon=1, initial_batch=0),
            "initial_batch must be an integer >= 1, got 0",
        ),
        (lambda: theory.StormSchedule(smoothness=math.inf), "smoothness must be a finite number > 0"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_plans_are_arguments_of_their_optimizers() -> None:
    x = [torch.zeros(2, requires_grad=True)]
    spider = theory.spiderboost_plan(smoothness=1.0, initial_gap=1.0, horizon=10, large_batch=100)
    hybrid = theory.hybrid_plan(smoothness=1.0, noise_variance=1.0, initial_gap=1.0, horizon=10)
    assert proxmo.ProxSpiderBoost(x, spider.lr, spider.period).param_groups[0]["period"] == 10
    assert proxmo.ProxHybridSGD(x, hybrid.lr, hybrid.momentum, hybrid.averaging).param_groups[0]["averaging"] < 1
