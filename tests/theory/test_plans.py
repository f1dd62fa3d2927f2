"""Plans: the formulas of the theorems, errors in their arguments, and guarantees that hold."""

from __future__ import annotations

import math
from typing import Any

import pytest

from proxmo import L1, MCP, theory
from proxmo.theory import REGIMES

KNOWN = {"smoothness": 2.0, "noise_variance": 9.0, "initial_gap": 3.0}


def test_names_of_the_regimes() -> None:
    assert list(REGIMES) == [
        "paper", "paper_refined", "paper_inexact", "convex", "monotone", "convex_inexact", "monotone_inexact",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rate", "remainder"),
    [
        ("paper", 48 * 3**1.5, 192),
        ("paper_refined", 96 * 3**1.5 / 2**0.75, 144 * math.sqrt(2)),
        ("paper_inexact", 136 * math.sqrt(8), 272),
        ("convex", 4 * math.sqrt(2), 4),
        ("monotone", 8, 8),
        ("convex_inexact", 8 * math.sqrt(2), 8),
        ("monotone_inexact", 32, 32),
    ],
)
def test_rates_are_those_of_the_theorems(name: str, rate: float, remainder: float) -> None:
    """A and B as the theorems state them; the table derives them from the other constants."""
    assert REGIMES[name].rate == pytest.approx(rate, rel=1e-14)
    assert REGIMES[name].remainder == pytest.approx(remainder, rel=1e-14)


@pytest.mark.parametrize("name", REGIMES)
def test_plan_for_a_horizon(name: str) -> None:
    plan = theory.plan(name, **KNOWN, horizon=5000)
    row = REGIMES[name]
    assert plan.horizon == 5000
    assert plan.lr == 1 / plan.M
    assert plan.momentum == 1 - plan.gamma
    assert plan.phi0 == 3.0 + row.alpha / 2.0 * 9.0
    s = math.sqrt(5000 * 2.0 * 9.0 / plan.phi0)
    grown = row.slope * s
    expected = row.floor * 2 + grown if name.startswith("paper") else max(row.floor * 2, grown)
    assert math.isclose(plan.M, expected)
    assert plan.guarantee == theory.guarantee(
        plan.M, name, smoothness=2.0, noise_variance=9.0, phi0=plan.phi0, horizon=5000
    )
    assert plan.guarantee <= row.rate * math.sqrt(2 * plan.phi0 * 9 / 5000) + row.remainder * 2 * plan.phi0 / 5000
    assert (plan.variance_guarantee is None) == (row.variance_descent is None)
    assert plan.inexactness is None


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("target", [10.0, 0.1, 1e-3])
@pytest.mark.parametrize("variance", [0.0, 9.0])
def test_plan_for_a_target_is_the_shortest_that_the_bound_allows(name: str, target: float, variance: float) -> None:
    plan = theory.plan(name, smoothness=2.0, noise_variance=variance, initial_gap=3.0, target=target)
    assert plan.guarantee <= target * (1 + 1e-12)
    row = REGIMES[name]
    aim = target if row.inexact_ratio is None else target / 2

    def bound(horizon: int) -> float:
        return row.rate * math.sqrt(2 * plan.phi0 * variance / horizon) + row.remainder * 2 * plan.phi0 / horizon

    assert bound(plan.horizon) <= aim * (1 + 1e-12)
    shorter = math.floor(plan.horizon * (1 - 1e-9)) - 1  # floats do not resolve one step in 10¹²
    assert plan.horizon == 1 or bound(shorter) > aim
    if row.inexact_ratio is not None:
        assert plan.inexactness == theory.inexactness_budget(target, name)


@pytest.mark.parametrize("name", [name for name, row in REGIMES.items() if row.variance_descent is not None])
@pytest.mark.parametrize("target", [10.0, 0.1, 1e-3])
@pytest.mark.parametrize("variance", [0.0, 9.0])
def test_plan_for_a_momentum_error_is_as_short_as_its_bound_allows(name: str, target: float, variance: float) -> None:
    """Theorem 2 as a plan: K is within 1% of the shortest horizon at which the bound at the planned M is ≤ ε."""
    known = {"smoothness": 2.0, "noise_variance": variance, "initial_gap": 3.0}
    plan = theory.plan(name, **known, target_variance=target)
    assert plan.variance_guarantee is not None
    assert plan.variance_guarantee <= target * (1 + 1e-12)
    if plan.horizon > 1000:
        shorter = theory.plan(name, **known, horizon=round(0.99 * plan.horizon))
        assert shorter.variance_guarantee is not None
        assert shorter.variance_guarantee > target


def test_planned_momentum_error_holds_on_the_quadratic() -> None:
    plan = theory.plan("paper_refined", smoothness=1.0, noise_variance=4.0, initial_gap=2.0, target_variance=0.5)
    moments = theory.quadratic_moments(
        plan, smoothness=1.0, curvature=3.0, noise_variance=4.0, start=1.0, horizon=plan.horizon
    )  # F₀ = (1 + 3)/2
    assert 0.5 / 20 < math.fsum(moments.variance[: plan.horizon]) / plan.horizon <= 0.5


def test_horizons_for_a_target() -> None:
    """For L = 1, σ² = 25, Φ₀ = 10, ε = 0.1, the sharper constants need 1/2000 of the steps."""

    def horizon(name: str) -> int:
        gap = 10.0 - REGIMES[name].alpha * 25.0 / 100
        return theory.plan(name, smoothness=1.0, noise_variance=25.0, initial_gap=gap, batch=100, target=0.1).horizon

    assert horizon("paper") == 1_555_238_400
    assert horizon("convex") == pytest.approx(8.0e5, rel=0.01)


def test_initial_potential_of_each_start() -> None:
    known = {"smoothness": 2.0, "noise_variance": 9.0, "initial_gap": 3.0}
    assert theory.initial_potential("convex", **known) == 3 + 0.5 / 2 * 9
    assert theory.initial_potential("convex", **known, batch=3) == 3 + 0.5 / 2 * 3
    assert theory.initial_potential("convex", **known, initial="zero") == 3 * 2
    assert theory.initial_potential("convex", **known, initial="penalty", gradient_norm=8.0) == 3 + 0.5 / 2 * 8


def test_initial_batch_bounds_the_initial_potential_whatever_the_noise() -> None:
    for variance in (0.0, 0.5, 9.0, 1234.5):
        batch = theory.initial_batch(2.0, variance, 3.0)
        for name, row in REGIMES.items():
            phi0 = theory.initial_potential(name, smoothness=2.0, noise_variance=variance, initial_gap=3.0, batch=batch)
            assert phi0 <= (1 + row.alpha) * 3.0 * (1 + 1e-12)


def test_without_noise_lr_is_the_largest_allowed() -> None:
    plan = theory.plan(smoothness=2.0, noise_variance=0.0, initial_gap=3.0, horizon=100)
    assert plan.M == 4.0
    assert plan.momentum == 0.0


def test_plan_at_the_optimum_is_one_step() -> None:
    plan = theory.plan(smoothness=1.0, noise_variance=0.0, initial_gap=0.0, target=0.1)
    assert plan.guarantee == 0
    assert plan.horizon == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regime": "magic"}, r"regime must be one of \['paper', .*, got 'magic'"),
        ({"smoothness": 0.0}, "smoothness must be a finite number > 0, got 0.0"),
        ({"noise_variance": -1.0}, "noise_variance must be a finite number >= 0, got -1.0"),
        ({"initial_gap": -1.0}, "initial_gap must be a finite number >= 0, got -1.0"),
        ({"horizon": 0}, "horizon must be an integer >= 1, got 0"),
        (
            {"horizon": 10, "target": 0.1},
            "give one of horizon, target and target_variance; got {'horizon': 10, 'target': 0.1}",
        ),
        ({"target_variance": 0.0}, "target_variance must be a finite number > 0, got 0.0"),
        (
            {"regime": "monotone", "target_variance": 0.1},
            r"regime must be one of \['paper', 'paper_refined', 'convex'\]",
        ),
        ({"target_variance": 1e-160}, "target_variance must be large enough for a finite horizon, got 1e-160"),
        ({"target": 0.0}, "target must be a finite number > 0, got 0.0"),
        ({"initial": "luck"}, "initial must be 'gradient', 'zero' or 'penalty', got 'luck'"),
        (
            {"initial": "zero", "penalty": L1(0.1)},
            r"initial='zero' needs ψ = 0: .*Theorem 1.*got penalty L1\(strength=0.1\)",
        ),
        ({"initial": "penalty"}, "initial='penalty' needs gradient_norm"),
        ({"penalty": MCP(0.1, 2.0)}, r"regime 'convex' needs ψ convex.*got penalty MCP"),
        ({"initial": "zero", "initial_gap": 0.0}, "initial_gap must be > 0 where there is noise"),
        ({"target": 1e-160}, "target must be large enough for a finite horizon, got 1e-160"),
        (
            {"regime": "convex_inexact", "target": 1e-160},
            "target must be large enough .*, got 1e-160",
        ),  # not half of it
        ({"horizon": 10**400}, r"horizon must be at most 1.79769e\+308, got more"),
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
    ],
)
def test_invalid_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        theory.plan(**{**KNOWN, **changes})


@pytest.mark.parametrize("name", REGIMES)
def test_M_below_the_floor_is_refused_with_the_name_of_the_theorem(name: str) -> None:
    row = REGIMES[name]
    known = {"smoothness": 2.0, "noise_variance": 9.0, "phi0": 3.0, "horizon": 10}
    assert theory.guarantee(2 * row.floor, name, **known) > 0
    with pytest.raises(
        ValueError, match=rf"M must be at least .* or the descent of {row.source} is not proved; got M = "
    ):
        theory.guarantee(2 * row.floor * 0.999, name, **known)
    assert row.gamma(2 * row.floor, 2.0) == pytest.approx(1.0, abs=0.01)


def test_bounds_that_a_regime_does_not_prove_are_refused() -> None:
    known = {"smoothness": 1.0, "noise_variance": 1.0, "phi0": 1.0, "horizon": 10}
    with pytest.raises(ValueError, match="inexactness must be 0 in regime 'convex'"):
        theory.guarantee(10.0, "convex", **known, inexactness=0.1)
    with pytest.raises(ValueError, match=r"regime must be one of \['paper', 'paper_refined', 'convex'\]"):
        theory.variance_guarantee(10.0, "monotone", **known)
    with pytest.raises(ValueError, match="which allow an inexact prox; got 'convex'"):
        theory.inexactness_budget(0.1, "convex")


def test_increasing_schedule() -> None:
    schedule = theory.IncreasingSchedule(smoothness=2.0, noise_variance=9.0, phi0=3.0, growth=1.0)
    for k in (0, 1, 50, 10_000):
        M = max(math.sqrt((k + 1) * 2 * 9 / 3), 8.0)
        rates = schedule(k)
        assert rates.lr == pytest.approx(1 / M)
        assert rates.momentum == pytest.approx(1 - 6 / (M - 2))
        assert schedule.weight(k + 1) == pytest.approx(1 / M)
    assert schedule(0).momentum == 0.0  # γ = 1 at M = 4L
    for horizon in (1, 100, 20_000):
        relaxed = 372 * math.log(math.e * horizon) * max(math.sqrt(2 * 3 * 9 / horizon), 4 * 2 * 3 / horizon)
        assert schedule.guarantee(horizon) <= relaxed
        printed = 372 * math.log(math.e * horizon) * (math.sqrt(2 * 3 * 9 / horizon) + 2 * 3 / horizon)
        assert schedule.guarantee(horizon) <= printed
    better = theory.IncreasingSchedule(smoothness=2.0, noise_variance=9.0, phi0=3.0)
    assert better.guarantee(20_000) < schedule.guarantee(20_000)
    with pytest.raises(ValueError, match="i must be an integer >= 1"):
        schedule.weight(0)
    with pytest.raises(ValueError, match="phi0 must be a finite number > 0"):
        theory.IncreasingSchedule(smoothness=2.0, noise_variance=9.0, phi0=0.0)


def test_rates_that_rounding_spoils_are_refused() -> None:
    assert theory.IncreasingSchedule(smoothness=1e-300, noise_variance=1.0, phi0=1.0)(0).momentum > 0
    with pytest.raises(ValueError, match=r"the arguments must give a first step with .* got Rates\(lr=0.0"):
        theory.IncreasingSchedule(smoothness=1e308, noise_variance=1.0, phi0=1.0)
    with pytest.raises(ValueError, match=r"the arguments must give a first step with .* got Rates\(lr=inf"):
        theory.StormSchedule(smoothness=1e-320)
    assert theory.StormSchedule(smoothness=1e308)(0) == (1.25e-309, theory.StormSchedule(smoothness=1.0)(0).momentum)


def test_initial_batch_must_be_finite() -> None:
    assert theory.initial_batch(smoothness=1e-200, noise_variance=1.0, initial_gap=1e200) == 1
    with pytest.raises(ValueError, match=r"noise_variance must be small enough for a finite batch, got 1\.0"):
        theory.initial_batch(smoothness=1e-200, noise_variance=1.0, initial_gap=1e-200)


def test_corollary_2_holds_as_printed() -> None:
    """Its last display loses a factor 4 of L·Φ₀/K, but the exact bound stays below the printed one for every noise."""
    largest = 0.0
    for exponent in range(-12, 13):
        variance = 10 ** (exponent / 2)
        schedule = theory.IncreasingSchedule(smoothness=1.0, noise_variance=variance, phi0=1.0, growth=1.0)
        for horizon in (1, 2, 3, 10, 100, 3000):
            printed = 372 * math.log(math.e * horizon) * (math.sqrt(variance / horizon) + 1 / horizon)
            largest = max(largest, schedule.guarantee(horizon) / printed)
    assert 0.9 < largest < 1


def test_a_regime_without_a_bound_on_the_momentum_error_says_so() -> None:
    with pytest.raises(ValueError, match="has no bound on the momentum error"):
        theory.REGIMES["monotone"].variance_rate  # noqa: B018
