"""`proxmo verify` and `proxmo plan`: every statement holds, and a false one is noticed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from proxmo import ProxSGD, theory
from proxmo.experiments import regime_checks, verification, worst_steps
from proxmo.experiments.check import Check, tightest
from proxmo.experiments.commands import app
from proxmo.theory import REGIMES, Regime

SHARP = [name for name, row in REGIMES.items() if not row.shifted]
WEAKER = {("remainder", 1), ("variance_descent", -1), ("inexact_ratio", 1)}  # these changes leave the claims true


@pytest.fixture(scope="module")
def found() -> list[Check]:
    return [one for check in verification.all_checks(horizon=60) for one in check()]


def test_every_statement_holds(found: list[Check]) -> None:
    for one in found:
        assert one.holds, one
        assert one.observed > 0, one
        assert one.factor >= 1 - 1e-9, one


def test_every_regime_and_lemma_is_checked(found: list[Check]) -> None:
    statements = " ".join(one.statement for one in found)
    for name in REGIMES:
        assert f"{name}: E‖∇F‖² of a step" in statements
        assert f"{name}: Φ₀" in statements
        places = [one.where for one in found if one.statement == f"{name}: mean E‖∇F‖²"]
        for where in ("quadratic", "ℓ1", "ℓ∞,1"):
            assert any(place.split(", S")[0] == where for place in places)
    for word in ("momentum error", "the objective", "the gradient", "vanilla", "increasing", "E‖m−∇f‖²", "noisy inner"):
        assert word in statements


@pytest.mark.parametrize("name", SHARP)
def test_a_constant_that_is_wrong_by_two_is_noticed(name: str) -> None:
    row = REGIMES[name]
    noticed = regime_checks.noticed_factors(row)
    for constant, factors in noticed.items():
        for sign, factor in zip((1, -1), factors, strict=True):
            if (constant, sign) in WEAKER:
                continue
            assert factor is not None, constant
            assert factor < 2, constant
            wrong = dataclasses.replace(row, **{constant: getattr(row, constant) * 2.0**sign})
            assert not all(one.holds for one in regime_checks.checks_of(wrong)), constant
    assert set(noticed) == {name for name in regime_checks.CONSTANTS if getattr(row, name) is not None}


@pytest.mark.parametrize("name", [name for name, row in REGIMES.items() if row.shifted])
def test_a_constant_of_the_paper_that_is_wrong_by_nine_is_noticed(name: str) -> None:
    """The constants of the paper are loose, so that no instance attains them."""
    for constant, factors in regime_checks.noticed_factors(REGIMES[name]).items():
        for sign, factor in zip((1, -1), factors, strict=True):
            assert (constant, sign) in WEAKER or (factor is not None and factor < 9), constant


BOUND, VARIANCE_BOUND = Regime.bound, Regime.variance_bound
POTENTIAL, GUARANTEE, VARIANCE_GUARANTEE = theory.initial_potential, theory.guarantee, theory.variance_guarantee
SHORTEST = theory.plans._shortest
WRONG: dict[str, tuple[object, str, Callable[..., float]]] = {
    "bound": (Regime, "bound", lambda *args: BOUND(*args) / 1.1),
    "bound of the momentum error": (Regime, "variance_bound", lambda *args: VARIANCE_BOUND(*args) / 1.1),
    "no noise in the bound of the momentum error": (
        Regime,
        "variance_bound",
        lambda row, M, L, _, start: VARIANCE_BOUND(row, M, L, 0.0, start),
    ),
    "guarantee": (theory, "guarantee", lambda *args, **options: GUARANTEE(*args, **options) / 1.1),
    "guarantee of K² steps": (
        theory,
        "guarantee",
        lambda *args, horizon, **options: GUARANTEE(*args, horizon=horizon**2, **options),
    ),
    "guarantee of the momentum error": (
        theory,
        "variance_guarantee",
        lambda *args, **options: VARIANCE_GUARANTEE(*args, **options) / 1.1,
    ),
    "horizon for a target": (theory.plans, "_shortest", lambda *args: SHORTEST(*args) // 2 + 1),
    "no L in the noise": (Regime, "noise", lambda row, M, L, variance: row.alpha * row.gamma(M, L) ** 2 * variance),
    "no L in γ": (Regime, "gamma", lambda row, M, L: min(row.gain / M, 1.0)),
    "no L in the planned M": (
        Regime,
        "best_M",
        lambda row, L, variance, phi0, K: max(row.floor * L, row.slope * math.sqrt(K * variance / phi0)),
    ),
    "Φ₀": (theory, "initial_potential", lambda *args, **options: POTENTIAL(*args, **options) / 1.1),
}


@pytest.mark.parametrize("formula", WRONG)
def test_a_formula_that_is_wrong_is_noticed(formula: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[formula])
    of_regime = (verification._starts, verification._guarantees, verification._targets)
    found = [*regime_checks.checks_of(REGIMES["convex"]), *(one for check in of_regime for one in check("convex"))]
    assert not all(one.holds for one in found)


def test_prox_errors_count_in_a_guarantee(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "guarantee", lambda *args, inexactness, **options: GUARANTEE(*args, **options))
    assert not all(one.holds for one in verification._guarantees("convex_inexact"))


def test_a_negative_bound_of_zero_is_not_hidden_by_other_steps() -> None:
    """With this α the potential rises at steps where the gradient is 0; at other M the bound is attained from below."""
    assert Check("", "", 0.0, -1.0).factor == -math.inf
    false = dataclasses.replace(REGIMES["monotone"], alpha=0.25 / 1.05)
    assert not all(one.holds for one in worst_steps.descent(false))


def test_inner_steps_without_their_first_phase_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory.InnerSchedule, "contracting", 0)
    assert [one.holds for one in verification._inner_steps()] == [False, True, False]


@pytest.mark.parametrize("turn", [0.0, 0.3, 0.5, 1.0])
def test_worst_steps_belong_to_a_real_problem(turn: float) -> None:
    """f' rises with slope 1 for this share of the way, then falls; the step is one of ProxSGD, with ψ = 0."""
    tau, start_slope, e = 3.0, 0.4, -0.7
    m = start_slope + e
    r = -m / tau

    def slope(u: float) -> float:
        way = u / r
        return start_slope + r * (way if way <= turn else 2 * turn - way)

    x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    x.grad = torch.full((1,), m, dtype=torch.float64)
    ProxSGD([x], lr=1 / tau, momentum=0.0).step()
    assert x.item() == pytest.approx(r)
    d = slope(r) - start_slope
    assert abs(d) <= abs(r)
    grid = torch.linspace(0, r, 20_001, dtype=torch.float64)
    rise = float(torch.trapezoid(torch.tensor([slope(u) for u in grid.tolist()], dtype=torch.float64), grid))

    step = worst_steps.Steps(tau, *(np.array(value) for value in (e, d, r, 0.0)))
    assert float(step.rise(convex=True)) == pytest.approx(rise, rel=1e-6)
    assert float(step.gradient) == pytest.approx(slope(r) ** 2)


def test_false_statement_is_noticed() -> None:
    for false in ((math.nan, 1.0), (1.0, math.nan), (0.0, math.nan), (math.inf, math.inf), (2.0, 1.0), (0.0, -1.0)):
        for true in ((1.0, 2.0), (1.0, math.inf), (0.0, 1.0)):
            assert not tightest("", "", iter([true, false])).holds
            assert not tightest("", "", iter([false, true])).holds
    assert not Check("false", "nowhere", observed=1.01, bound=1.0).holds
    assert Check("true", "here", observed=1.0, bound=1.0).holds
    assert Check("nothing observed", "here", observed=0.0, bound=1.0).factor == math.inf
    assert Check("unknown", "here", observed=1.0, bound=math.nan).factor == -math.inf


def test_a_lemma_that_is_wrong_by_a_quarter_is_noticed() -> None:
    for one in worst_steps.lemmas():
        assert one.factor < 1.25


def test_verify_command_prints_both_tables() -> None:
    done = CliRunner().invoke(app, ["verify", "--horizon", "10", "--quiet"])
    assert done.exit_code == 0
    assert "vanilla: σ²/4" in done.output
    assert "too large/too small" in done.output
    assert "NO" not in done.output
    assert "…" not in done.output


@pytest.mark.parametrize("option", ["--target", "--target-variance"])
def test_plan_command_prints_all_regimes(option: str) -> None:
    arguments = ["plan", "--smoothness", "1", "--noise-variance", "25", "--initial-gap", "10", option, "0.1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert "1,801,800" in done.output
    assert "…" not in done.output
    assert ("monotone_inexact" in done.output) == (option == "--target")
    wrong = CliRunner().invoke(app, [*arguments, "--horizon", "5"])
    assert wrong.exit_code == 2
    assert "give one of horizon, target" in wrong.output
