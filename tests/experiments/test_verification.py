"""`proxmo verify` and `proxmo plan`: every statement holds, and a false one would be noticed."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

from proxmo.experiments import verification
from proxmo.experiments.commands import app


@pytest.fixture(scope="module")
def found() -> list[verification.Check]:
    return [one for check in verification.all_checks(horizon=60) for one in check()]


def test_every_statement_holds(found: list[verification.Check]) -> None:
    for one in found:
        assert one.holds, one
        assert one.observed > 0, one
        assert one.slack >= 1 - 1e-9, one


def test_every_regime_and_lemma_is_checked(found: list[verification.Check]) -> None:
    statements = " ".join(one.statement for one in found)
    for name in ("paper", "paper_refined", "paper_inexact", "convex", "monotone", "convex_inexact", "monotone_inexact"):
        assert f"{name}: descent of Φ" in statements
        places = [one.where for one in found if one.statement == f"{name}: mean E‖∇F‖²"]
        for where in ("quadratic", "ℓ1", "ℓ∞,1"):
            assert any(place.split(", S")[0] == where for place in places)
    for word in ("momentum error", "the objective", "the gradient", "vanilla", "increasing", "E‖m−∇f‖²"):
        assert word in statements


def test_bounds_are_not_vacuous(found: list[verification.Check]) -> None:
    """The sharpened descent bound is tight up to a small factor, a lemma up to a few percent."""
    assert min(one.slack for one in found if "convex: descent" in one.statement) < 2.5
    assert min(one.slack for one in found if "momentum error" in one.statement) < 1.1


@pytest.mark.parametrize("name", verification.REGIMES)
def test_false_constant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims 64 times the proven descent; the factor is large because the constants of the paper are loose."""
    row = verification.REGIMES[name]
    monkeypatch.setitem(verification.REGIMES, name, dataclasses.replace(row, descent=64 * row.descent))
    found = {one.statement: one for one in verification._descent_of_potentials()}
    assert not found[f"{name}: descent of Φ"].holds


def test_false_statement_is_noticed() -> None:
    assert not verification._tightest("nan", "", iter([(1.0, 2.0), (float("nan"), 1.0)])).holds
    assert not verification.Check("false", "nowhere", observed=1.01, bound=1.0).holds
    assert verification.Check("true", "here", observed=1.0, bound=1.0).holds


def test_verify_command_prints_a_table() -> None:
    done = CliRunner().invoke(app, ["verify", "--horizon", "10", "--quiet"])
    assert done.exit_code == 0
    assert "Proposition 1" in done.output.replace("\n", " ") or "vanilla" in done.output
    assert "NO" not in done.output


def test_plan_command_prints_all_regimes() -> None:
    arguments = ["plan", "--smoothness", "1", "--noise-variance", "25", "--initial-gap", "10"]
    done = CliRunner().invoke(app, [*arguments, "--target", "0.1"])
    assert done.exit_code == 0
    assert "1,801,800" in done.output
    assert "…" not in done.output
    assert "monotone_inexact" in done.output
    wrong = CliRunner().invoke(app, [*arguments, "--target", "0.1", "--horizon", "5"])
    assert wrong.exit_code == 2
    assert "give horizon or target" in wrong.output
