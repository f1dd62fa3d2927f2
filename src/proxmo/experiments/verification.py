"""Numerical checks of the theory.

The constants of the regimes are checked at the worst steps on a line (`regime_checks`). The bounds of the theorems are
checked on whole runs: with exact moments on the quadratic, and by Monte Carlo on a non-convex regression with ℓ1 or
ℓ∞,1 and known constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from proxmo import ProxHybridSGD, ProxSGD, ProxSpiderBoost, RateScheduler, theory
from proxmo.experiments.check import Check, tightest
from proxmo.experiments.problems import RobustRegression
from proxmo.experiments.regime_checks import FORMULA, checks_of
from proxmo.experiments.worst_steps import lemmas
from proxmo.theory import REGIMES, IncreasingSchedule, Initial, InnerSchedule, Moments, Plan, Rates

L, CURVATURE, VARIANCE, START = 2.0, 30.0, 9.0, 4.0
RUNS = 20
LABELS = {"l1": "ℓ1", "linf1": "ℓ∞,1"}


def all_checks(horizon: int = 500) -> list[Callable[[], list[Check]]]:
    """Return all checks as functions to call, so that a progress bar can follow them."""
    exact = [name for name, row in REGIMES.items() if row.inexact_ratio is None]
    inexact = [name for name, row in REGIMES.items() if row.inexact_ratio is not None]
    return [
        lemmas,
        *(partial(list, checks_of(row)) for row in REGIMES.values()),
        *(partial(_starts, name) for name in REGIMES),
        *(partial(_guarantees, name) for name in REGIMES),
        *(partial(_targets, name) for name in REGIMES),
        _inner_steps,
        partial(_quadratic_guarantees, horizon),
        _lower_bound_of_vanilla,
        *(partial(_regression_guarantees, name, kind, horizon) for name in exact for kind in LABELS),
        *(partial(_inexact_guarantees, name, kind, horizon) for name in inexact for kind in LABELS),
        *(partial(_increasing_guarantee, kind, horizon) for kind in LABELS),
        *(partial(_spiderboost_guarantee, kind, horizon) for kind in LABELS),
        *(partial(_hybrid_guarantee, kind, horizon) for kind in LABELS),
    ]


def _constant(M: float, gamma: float) -> Callable[[int], Rates]:
    return lambda k: Rates(1 / M, 1 - gamma)


def _moments(rates: Callable[[int], Rates], horizon: int, start: float = START) -> Moments:
    return theory.quadratic_moments(
        rates, smoothness=L, curvature=CURVATURE, noise_variance=VARIANCE, start=start, horizon=horizon
    )


def _plan(name: str, horizon: int) -> Plan:
    gap = (L + CURVATURE) / 2 * START
    return theory.plan(name, smoothness=L, noise_variance=VARIANCE, initial_gap=gap, horizon=horizon)


def _quadratic_guarantees(horizon: int) -> list[Check]:
    """Check the planned runs with exact moments: the mean of E‖∇F‖², and of the momentum error if it has a bound."""
    found = []
    for name in REGIMES:
        plan = _plan(name, horizon)
        moments = _moments(plan, horizon)
        mean = math.fsum(moments.gradient[1:]) / horizon
        found.append(Check(f"{name}: mean E‖∇F‖²", "quadratic", mean, plan.guarantee))
        if plan.variance_guarantee is not None:
            mean = math.fsum(moments.variance[:horizon]) / horizon
            statement = f"{name}: mean E‖m−∇f‖²"
            found.append(Check(statement, "quadratic", mean, plan.variance_guarantee))
    return found


def _starts(name: str) -> list[Check]:
    """Check Φ₀ for the three starts, with exact moments; on the quadratic it is an equality."""

    def pairs() -> Iterator[tuple[float, float]]:
        for initial in get_args(Initial):
            moments = theory.quadratic_moments(
                _constant(M=100.0, gamma=0.1),
                smoothness=L,
                curvature=0.0 if initial == "zero" else CURVATURE,
                noise_variance=VARIANCE,
                start=START,
                horizon=1,
                initial=initial,
                batch=3,
            )
            phi0 = theory.initial_potential(
                name,
                smoothness=L,
                noise_variance=VARIANCE,
                initial_gap=moments.objective[0],
                initial=initial,
                batch=3,
                gradient_norm=moments.gradient[0],
            )
            yield moments.objective[0] + REGIMES[name].alpha / L * moments.variance[0], phi0

    return [tightest(f"{name}: Φ₀", "quadratic", pairs())]


def _guarantees(name: str) -> list[Check]:
    """Check that guarantees for K steps are those of a step on which Φ falls by Φ₀/K, which the worst steps attain."""
    row, horizon, phi0 = REGIMES[name], 5, 3.0
    found = []
    for tau in (row.floor, 3 * row.floor):
        error = 0.0 if row.inexact_ratio is None else 0.7
        known = {"smoothness": L, "noise_variance": VARIANCE, "phi0": phi0, "horizon": horizon}
        bound = theory.guarantee(tau * L, name, **known, inexactness=error)  # type: ignore[arg-type]
        of_step = row.bound(tau * L, L, VARIANCE, phi0 / horizon, error)
        found.append(Check(f"{name}: guarantee", FORMULA, of_step, bound))
        if row.variance_descent is not None:
            of_step = row.variance_bound(tau * L, L, VARIANCE, phi0 / horizon)
            bound = theory.variance_guarantee(tau * L, name, **known)  # type: ignore[arg-type]
            found.append(Check(f"{name}: guarantee for m", FORMULA, of_step, bound))
    return [min(same, key=lambda one: one.factor) for same in _by_statement(found)]


def _targets(name: str) -> list[Check]:
    """Check that the horizon planned for a target is long enough."""
    found = []
    for variance in (0.0, 0.1, VARIANCE, 1e4):
        for target in (0.01, 1.0):
            known = {"smoothness": L, "noise_variance": variance, "initial_gap": 3.0}
            reached = theory.plan(name, **known, target=target).guarantee  # type: ignore[arg-type]
            found.append(Check(f"{name}: plan for ‖∇F‖²", FORMULA, reached, target))
            if REGIMES[name].variance_descent is not None:
                of_error = theory.plan(name, **known, target_variance=target)  # type: ignore[arg-type]
                assert of_error.variance_guarantee is not None
                found.append(Check(f"{name}: plan for ‖m−∇f‖²", FORMULA, of_error.variance_guarantee, target))
    return [min(same, key=lambda one: one.factor) for same in _by_statement(found)]


def _by_statement(checks: list[Check]) -> list[list[Check]]:
    return [[one for one in checks if one.statement == name] for name in dict.fromkeys(one.statement for one in checks)]


def _lower_bound_of_vanilla() -> list[Check]:
    """Check Proposition 1: from any start and for any M ≤ a, vanilla never gets below σ²/4."""

    def pairs() -> Iterator[tuple[float, float]]:
        for start in (0.0, START):
            for M in (L, 3.0, 10.0, CURVATURE):
                moments = _moments(_constant(M, gamma=1.0), 200, start)
                yield from ((VARIANCE / 4, error) for error in moments.gradient[1:])

    return [tightest("vanilla: σ²/4 ≤ E‖∇F‖²", "quadratic", pairs())]


def _inner_steps() -> list[Check]:
    """Check Proposition 2 with exact moments: E‖∇Ω(u)‖² ≤ (M²/16)·E‖u − x‖² + S for quadratic ψ, from near and far."""

    def pairs(noise_variance: float, distances: tuple[float, ...]) -> Iterator[tuple[float, float]]:
        for smoothness, M in ((9.0, 1.0), (60.0, 3.0), (3.0, 100.0)):
            schedule = InnerSchedule(smoothness, M, noise_variance, inexactness=1.0 if noise_variance else 0.0)
            for slope in (M, M + smoothness):  # of the subproblem
                for distance in distances:
                    yield _inexactness(schedule, slope, distance)

    return [
        tightest("inner steps: E‖∇Ω‖²", "quadratic", pairs(0.0, distances=(1.0,))),
        tightest("noisy inner steps: E‖∇Ω‖²", "quadratic", pairs(10.0, distances=(0.0, 1.0, 100.0))),
        # little noise, where the first steps of the schedule have to come near the solution
        tightest("inner steps, little noise: E‖∇Ω‖²", "quadratic", pairs(0.05, distances=(100.0,))),
    ]


def _inexactness(schedule: InnerSchedule, slope: float, distance: float) -> tuple[float, float]:
    """Return E‖∇Ω(u)‖² and what is allowed, for Ω' = slope·(u − u*) with u* at this distance from x."""
    mean, variance = distance, 0.0  # of u_t − u*
    squared = moved = total = 0.0
    for t in range(schedule.steps + 1):
        weight, lr = schedule.weight(t), schedule(t)
        squared += weight * slope**2 * (mean**2 + variance)
        moved += weight * ((distance - mean) ** 2 + variance)
        total += weight
        mean, variance = (1 - lr * slope) * mean, (1 - lr * slope) ** 2 * variance + lr**2 * schedule.noise_variance
    return squared / total, schedule.M**2 / 16 * moved / total + schedule.inexactness


def _inexact_guarantees(name: str, kind: str, horizon: int) -> list[Check]:
    """Check an inexact prox: x⁺ = prox(x − (m − w)/M) has ∇Ω(x⁺) = w, ‖w‖² = S.

    w is random, but the same in all steps: where it changes its direction its effects cancel. If the regime needs a
    monotone prox, runs where this step would increase Ω take the exact step instead.
    """
    problem = RobustRegression(kind, kind, batch=8)
    plan = _regression_plan(name, problem, horizon)
    squared_error = 1.0  # so large that it is most of the bound
    generator = torch.Generator().manual_seed(0)
    x, m, total = problem.start(RUNS), None, 0.0
    error = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    bias = error * (math.sqrt(squared_error) / error.square().flatten(1).sum(1).sqrt())[:, None, None]
    for _ in range(horizon):
        w, g = bias, problem.gradient(x, problem.sample(RUNS, generator))
        m = g if m is None else torch.lerp(m, g, plan.gamma)
        moved = problem.penalty.prox(x - plan.lr * (m - w), plan.lr)
        if not name.startswith("convex"):
            increases = _subproblem(problem, plan.M, m, x, moved) > _subproblem(problem, plan.M, m, x, x)
            w = torch.where(increases[:, None, None], 0.0, w)
            moved = problem.penalty.prox(x - plan.lr * (m - w), plan.lr)
        subgradient = w - m - plan.M * (moved - x)
        x = moved
        total += _mean_square(problem.full_gradient(x) + subgradient)
    bound = theory.guarantee(
        plan.M,
        name,
        smoothness=problem.smoothness,
        noise_variance=problem.noise_variance,
        phi0=plan.phi0,
        horizon=horizon,
        inexactness=squared_error,
    )
    where = f"{LABELS[kind]}, S={squared_error:g}"
    return [Check(f"{name}: mean E‖∇F‖²", where, total / horizon, bound)]


def _subproblem(problem: RobustRegression, M: float, m: Tensor, x: Tensor, u: Tensor) -> Tensor:
    """Return Ω(u) = <m, u> + ψ(u) + (M/2)‖u − x‖², per run."""
    penalties = torch.stack([problem.penalty.value(one.unsqueeze(0)) for one in u])
    return (m * u + M / 2 * (u - x).square()).flatten(1).sum(1) + penalties


def _regression_plan(name: str, problem: RobustRegression, horizon: int) -> Plan:
    return theory.plan(
        name,
        smoothness=problem.smoothness,
        noise_variance=problem.noise_variance,
        initial_gap=float(problem.objective(problem.start(1))),  # F ≥ 0
        horizon=horizon,
    )


def _regression_guarantees(name: str, kind: str, horizon: int) -> list[Check]:
    problem = RobustRegression(kind, kind, batch=8)
    plan = _regression_plan(name, problem, horizon)
    gradients, errors = _run_regression(problem, plan, horizon)
    where = LABELS[kind]
    found = [Check(f"{name}: mean E‖∇F‖²", where, sum(gradients) / horizon, plan.guarantee)]
    if plan.variance_guarantee is not None:
        statement = f"{name}: mean E‖m−∇f‖²"
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
    where = LABELS[kind]
    return [Check("increasing M: mean E‖∇F‖²", where, mean, schedule.guarantee(horizon))]


def _spiderboost_guarantee(kind: str, horizon: int) -> list[Check]:
    samples = RobustRegression.SAMPLES
    batch = theory.spiderboost_plan(smoothness=1, initial_gap=1, horizon=1, large_batch=samples).batch
    problem = RobustRegression(kind, kind, batch)
    gap = float(problem.objective(problem.start(1)))
    plan = theory.spiderboost_plan(
        smoothness=problem.mean_square_smoothness, initial_gap=gap, horizon=horizon, large_batch=samples
    )
    x = Parameter(problem.start(RUNS))
    optimizer = ProxSpiderBoost([x], plan.lr, plan.period, problem.penalty)
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(horizon):
        total += float(problem.mapping_norm(x.detach(), plan.lr).mean())
        optimizer.step(_closure(problem, x, problem.sample(RUNS, generator)), _closure(problem, x, None))
    return [Check("SpiderBoost: mean E‖G‖²", LABELS[kind], total / horizon, plan.guarantee)]


def _hybrid_guarantee(kind: str, horizon: int) -> list[Check]:
    problem = RobustRegression(kind, kind, batch=8)
    gap = float(problem.objective(problem.start(1)))
    plan = theory.hybrid_plan(
        smoothness=problem.mean_square_smoothness,
        noise_variance=problem.noise_variance,
        initial_gap=gap,
        horizon=horizon,
    )
    x = Parameter(problem.start(RUNS))
    optimizer = ProxHybridSGD([x], plan.lr, plan.momentum, plan.averaging, problem.penalty)
    generator = torch.Generator().manual_seed(0)
    first = RobustRegression(kind, kind, batch=8 * plan.initial_batch).sample(RUNS, generator)
    total = 0.0
    for k in range(horizon):
        total += float(problem.mapping_norm(x.detach(), plan.lr).mean())
        one = problem.sample(RUNS, generator) if k else first
        optimizer.step(_closure(problem, x, one), _closure(problem, x, problem.sample(RUNS, generator)))
    return [Check("hybrid SGD: mean E‖G‖²", LABELS[kind], total / horizon, plan.guarantee)]


def _closure(problem: RobustRegression, x: Parameter, sample: Tensor | None) -> Callable[[], None]:
    """Return a closure that sets the gradient on a sample, or the full gradient without one."""

    def closure() -> None:
        point = x.detach()
        x.grad = problem.full_gradient(point) if sample is None else problem.gradient(point, sample)

    return closure


def _run_regression(
    problem: RobustRegression, rates: Callable[[int], Rates], horizon: int
) -> tuple[list[float], list[float]]:
    """Return E‖∇F(x_k)‖² for k = 1 … K, with the certified subgradient, and E‖m_k − ∇f(x_k)‖² for k = 0 … K − 1."""
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
