"""Every statement of the theory put to the test: what was observed beside what was promised.

Inequalities between expectations are checked with the exact moments on the quadratic, at every step and for several M;
bounds of the theorems by Monte Carlo on a non-convex regression with ℓ1 and ℓ∞,1, where all constants are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from proxmo import ProxSGD, RateScheduler, theory
from proxmo.experiments.problems import RobustRegression
from proxmo.theory import REGIMES, IncreasingSchedule, Moments, Plan, Rates

L, CURVATURE, VARIANCE, START = 2.0, 30.0, 9.0, 4.0
RUNS = 20


@dataclass(frozen=True)
class Check:
    """One statement: ``observed`` must not exceed ``bound``."""

    statement: str
    where: str
    observed: float
    bound: float

    @property
    def slack(self) -> float:
        """How many times the bound is larger than what was observed."""
        return self.bound / self.observed if self.observed else math.inf

    @property
    def holds(self) -> bool:
        """Whether it is so, up to rounding."""
        return self.observed <= self.bound * (1 + 1e-9) + 1e-12


def all_checks(horizon: int = 500) -> list[Callable[[], list[Check]]]:
    """All checks, each a function to call, so that a progress bar can show how far it is."""
    return [
        _lemmas,
        _descent_of_potentials,
        lambda: _quadratic_guarantees(horizon),
        lambda: _inexact_guarantees(horizon),
        _lower_bound_of_vanilla,
        *(
            lambda name=name, kind=kind: _regression_guarantees(name, kind, horizon)
            for name in ("paper", "paper_refined", "convex", "monotone")
            for kind in ("l1", "linf1")
        ),
        lambda: _increasing_guarantee("l1", horizon),
    ]


def _constant(M: float, gamma: float) -> Callable[[int], Rates]:
    return lambda k: Rates(1 / M, 1 - gamma)


def _moments(rates: Callable[[int], Rates], horizon: int, start: float = START) -> Moments:
    return theory.quadratic_moments(
        rates, smoothness=L, curvature=CURVATURE, noise_variance=VARIANCE, start=start, horizon=horizon
    )


def _tightest(statement: str, where: str, pairs: Iterator[tuple[float, float]]) -> Check:
    """Of many instances (observed, bound) the one with the least slack."""
    worst = min(pairs, key=lambda pair: pair[1] / pair[0] if pair[0] > 0 else math.inf)
    return Check(statement, where, *worst)


def _lemmas() -> list[Check]:
    """The three inequalities that the paper's proof is made of, each rearranged so that both sides are positive."""
    settings = [(M, gamma) for M in (4.5 * L, 20.0, 200.0) for gamma in (0.03, 0.3, 1.0)]
    runs = [(M, gamma, _moments(_constant(M, gamma), 200)) for M, gamma in settings]
    steps = [(M, g, k, r) for M, g, r in runs for k in range(200)]
    where = "quadratic, exact moments, 9 settings, 200 steps"
    return [
        _tightest(
            "momentum error: Δ⁺ ≤ (1−γ)Δ + (L²/γ)R + γ²σ²",
            where,
            (
                (r.variance[k + 1], (1 - g) * r.variance[k] + L**2 / g * r.movement[k] + g**2 * VARIANCE)
                for _, g, k, r in steps
            ),
        ),
        _tightest(
            "objective: F⁺ + (M−L)/4·R ≤ F + Δ/(M−L)",
            where,
            (
                (r.objective[k + 1] + (M - L) / 4 * r.movement[k], r.objective[k] + r.variance[k] / (M - L))
                for M, _, k, r in steps
            ),
        ),
        _tightest(
            "gradient: E‖∇F⁺‖² ≤ 3(M²+L²)R + 3Δ",
            where,
            ((r.gradient[k + 1], 3 * (M**2 + L**2) * r.movement[k] + 3 * r.variance[k]) for M, _, k, r in steps),
        ),
    ]


def _potential(name: str, moments: Moments) -> list[float]:
    weight = REGIMES[name].alpha / L
    return [f + weight * v for f, v in zip(moments.objective, moments.variance, strict=True)]


def _descent_of_potentials() -> list[Check]:
    """Φ⁺ + c·E‖∇F⁺‖² ≤ Φ + (α/L)γ²σ² in every step, for each regime and several M."""
    found = []
    for name, row in REGIMES.items():

        def pairs(name: str = name) -> Iterator[tuple[float, float]]:
            row = REGIMES[name]
            for M in (row.floor * L, 2 * row.floor * L, 100 * L):
                gamma = row.gamma(M, L)
                moments = _moments(_constant(M, gamma), 200)
                phi = _potential(name, moments)
                for k in range(200):
                    left = phi[k + 1] + row.decrease(M, L) * moments.gradient[k + 1]
                    yield left, phi[k] + row.noise(M, L, VARIANCE)

        found.append(_tightest(f"{name}: Φ⁺ + c·E‖∇F⁺‖² ≤ Φ + (α/L)γ²σ²", f"quadratic, {row.source}", pairs()))
    return found


def _plan(name: str, horizon: int) -> Plan:
    gap = (L + CURVATURE) / 2 * START
    return theory.plan(name, smoothness=L, noise_variance=VARIANCE, initial_gap=gap, horizon=horizon)


def _quadratic_guarantees(horizon: int) -> list[Check]:
    """The planned runs in exact moments: the mean of E‖∇F‖², and of the momentum error where the regime bounds it."""
    found = []
    for name in REGIMES:
        plan = _plan(name, horizon)
        moments = _moments(plan, horizon)
        mean = math.fsum(moments.gradient[1:]) / horizon
        found.append(Check(f"{name}: mean E‖∇F‖² ≤ guarantee", f"quadratic, K = {horizon}", mean, plan.guarantee))
        if plan.variance_guarantee is not None:
            mean = math.fsum(moments.variance[:horizon]) / horizon
            statement = f"{name}: mean E‖m−∇f‖² ≤ guarantee"
            found.append(Check(statement, f"quadratic, K = {horizon}", mean, plan.variance_guarantee))
    return found


def _lower_bound_of_vanilla() -> list[Check]:
    """Proposition 1: started at the solution or anywhere, no M ≤ a brings vanilla below σ²/4, not even once."""

    def pairs() -> Iterator[tuple[float, float]]:
        for start in (0.0, START):
            for M in (L, 3.0, 10.0, CURVATURE):
                moments = _moments(_constant(M, gamma=1.0), 200, start)
                yield from ((VARIANCE / 4, error) for error in moments.gradient[1:])

    return [_tightest("vanilla: σ²/4 ≤ E‖∇F(x_k)‖² for all k ≥ 1, M ≤ a", "quadratic, Proposition 1", pairs())]


def _inexact_guarantees(horizon: int) -> list[Check]:
    """A prox that misses by a random error of squared size S (or less, where monotonicity asks for it), Monte Carlo."""
    found = []
    for name in ("paper_inexact", "convex_inexact", "monotone_inexact"):
        plan = _plan(name, horizon)
        missed = 0.5
        generator = torch.Generator().manual_seed(0)
        x = torch.full((RUNS, 4), math.sqrt(START / 4), dtype=torch.float64)
        m = None
        total = 0.0
        for _ in range(horizon):
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype) * math.sqrt(VARIANCE / 4)
            g = L * x + noise
            m = g if m is None else (1 - plan.gamma) * m + plan.gamma * g
            error = torch.nn.functional.normalize(torch.randn(x.shape, generator=generator, dtype=x.dtype), dim=1)
            size = torch.full((RUNS, 1), math.sqrt(missed), dtype=x.dtype)
            if not name.startswith("convex"):  # Ω(x⁺) ≤ Ω(x) on a quadratic means ‖∇Ω(x⁺)‖ ≤ ‖∇Ω(x)‖
                size = torch.minimum(size, (m + CURVATURE * x).norm(dim=1, keepdim=True))
            x = (plan.M * x - m + size * error) / (plan.M + CURVATURE)
            total += float(((L + CURVATURE) * x).square().sum(1).mean())
        bound = theory.guarantee(
            plan.M,
            name,
            smoothness=L,
            noise_variance=VARIANCE,
            phi0=plan.phi0,
            horizon=horizon,
            inexactness=missed,
        )
        where = f"quadratic, S = {missed:g}, {RUNS} runs, K = {horizon}"
        found.append(Check(f"{name}: mean E‖∇F‖² ≤ guarantee", where, total / horizon, bound))
    return found


def _regression_guarantees(name: str, kind: str, horizon: int) -> list[Check]:
    problem = RobustRegression(kind, kind, batch=8)
    plan = theory.plan(
        name,
        smoothness=problem.smoothness,
        noise_variance=problem.noise_variance,
        initial_gap=float(problem.objective(problem.start(1))),
        horizon=horizon,
    )
    gradients, errors = _run_regression(problem, plan, horizon)
    where = f"robust regression, {problem.penalty}, {RUNS} runs, K = {horizon}"
    found = [Check(f"{name}: mean E‖∇F‖² ≤ guarantee", where, sum(gradients) / horizon, plan.guarantee)]
    if plan.variance_guarantee is not None:
        statement = f"{name}: mean E‖m−∇f‖² ≤ guarantee"
        found.append(Check(statement, where, sum(errors) / horizon, plan.variance_guarantee))
    return found


def _increasing_guarantee(kind: str, horizon: int) -> list[Check]:
    problem = RobustRegression(kind, kind, batch=8)
    smoothness, variance = problem.smoothness, problem.noise_variance
    gap = float(problem.objective(problem.start(1)))
    phi0 = theory.initial_potential("paper", smoothness=smoothness, noise_variance=variance, initial_gap=gap)
    schedule = IncreasingSchedule(smoothness, variance, phi0)
    gradients, _ = _run_regression(problem, schedule, horizon)
    weights = [schedule.weight(i) for i in range(1, horizon + 1)]
    mean = math.fsum(w * g for w, g in zip(weights, gradients, strict=True)) / math.fsum(weights)
    where = f"robust regression, {problem.penalty}, {RUNS} runs, K = {horizon}"
    return [Check("increasing M_k: weighted mean E‖∇F‖² ≤ guarantee", where, mean, schedule.guarantee(horizon))]


def _run_regression(
    problem: RobustRegression, rates: Callable[[int], Rates], horizon: int
) -> tuple[list[float], list[float]]:
    """E‖∇F(x_k)‖² for k = 1 … K with the certified subgradient, and E‖m_k − ∇f(x_k)‖² for k = 0 … K − 1."""
    x = Parameter(problem.start(RUNS))
    optimizer = ProxSGD([x], penalty=problem.penalty)
    optimizer.certify = True
    scheduler = RateScheduler(optimizer, rates)
    generator = torch.Generator().manual_seed(0)
    gradients, errors = [], []
    for _ in range(horizon):
        before = problem.full_gradient(x.detach())
        x.grad = problem.gradient(x.detach(), problem.sample(RUNS, generator))
        optimizer.step()
        scheduler.step()
        certificate = optimizer.certificate(x)
        errors.append(_mean_square(certificate.direction - before))
        gradients.append(_mean_square(problem.full_gradient(x.detach()) + certificate.subgradient))
    return gradients, errors


def _mean_square(vectors: Tensor) -> float:
    return float(vectors.square().flatten(1).sum(1).mean())
