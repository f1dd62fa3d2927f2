"""The synthetic quadratic: results agree with theory and with `ProxSGD`, and hits with the curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from proxmo import ProxSGD, SquaredL2, theory
from proxmo.experiments import synthetic


@pytest.fixture(scope="module")
def results() -> synthetic.Results:
    return synthetic.run(seeds=40, iterations=1000)


def test_results_have_every_cell(results: synthetic.Results) -> None:
    assert len(results.cells) == len(results.curves) == 3 * (25 + 15) + 3 + 3
    assert {cell.sigma for cell in results.cells} == {5.0, 25.0, 125.0}
    assert all(curve.mean.shape == curve.one_run.shape == (1000,) for curve in results.curves)


def test_stationary_errors_equal_the_closed_form(results: synthetic.Results) -> None:
    """Up to Monte Carlo error, for the cells that no longer depend on their start in the last tenth."""
    settled = [c for c in results.cells if c.gamma is not None and c.gamma >= 0.01]
    assert len(settled) == 3 * (10 + 15) + 3
    for cell in settled:
        assert cell.M is not None
        assert cell.gamma is not None
        assert cell.closed_form == theory.quadratic_floor(
            1.0, 1e4, cell.sigma**2 / cell.batch, M=cell.M, gamma=cell.gamma
        )
        assert cell.stationary == pytest.approx(cell.closed_form, rel=0.25)


def test_momentum_is_far_below_the_floor_of_vanilla(results: synthetic.Results) -> None:
    for sigma in synthetic.SIGMAS:
        momentum, vanilla = (results.cells[results.best(m, sigma)] for m in ("momentum", "vanilla"))
        assert momentum.stationary < vanilla.stationary / 10
        assert vanilla.stationary > sigma**2 / 4
        assert vanilla.median_samples is None
    quiet = results.cells[results.find("momentum", 5.0, M=10.0, gamma=0.01)]
    assert quiet.hit_share > 0.5
    assert quiet.median_samples is not None


def test_hits_agree_with_the_curves(results: synthetic.Results) -> None:
    """With one seed the curve is the run, so it shows the first hit."""
    single = synthetic.run(seeds=1, iterations=1000)
    hits = 0
    for cell, curve in zip(single.cells, single.curves, strict=True):
        np.testing.assert_array_equal(curve.one_run, curve.mean)
        below = np.flatnonzero(curve.one_run <= synthetic.TOLERANCE)
        assert cell.hit_share == float(below.size > 0)
        assert cell.median_samples == ((below[0] + 1) * cell.batch if below.size else None)
        hits += below.size > 0
    assert 0 < hits < len(single.cells)


def test_sweep_takes_the_steps_of_prox_sgd() -> None:
    """Compares every cell with `ProxSGD` on the same noise."""
    iterations, sigma = 30, synthetic.SIGMAS[1]
    results = synthetic.run(seeds=1, iterations=iterations, problem=synthetic.SHIFTED)
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(1, 5, generator=generator, dtype=torch.float64) for _ in range(iterations)]
    compared = 0
    for cell, curve in zip(results.cells, results.curves, strict=True):
        if cell.sigma != sigma:
            continue
        assert cell.M is not None
        x = torch.nn.Parameter(torch.full((1, 5), synthetic.START, dtype=torch.float64))
        optimizer = ProxSGD([x], 1 / cell.M, 1 - (cell.gamma or 0.5), SquaredL2(synthetic.SHIFTED.curvature))
        for k in range(iterations):
            if cell.gamma is None and k > 0:
                optimizer.param_groups[0]["momentum"] = 1 - 1 / (k + 1)
            x.grad = x.detach() - synthetic.SHIFTED.shift + noise[k] * (sigma / math.sqrt(5 * cell.batch))
            optimizer.step()
            assert curve.one_run[k] == pytest.approx(synthetic.SHIFTED.error(x.detach()).item(), rel=1e-9)
        compared += 1
    assert compared == 25 + 15 + 1 + 1


def test_many_seeds_run_in_several_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "SEEDS_AT_ONCE", 4)
    called: list[None] = []
    results = synthetic.run(seeds=10, iterations=200, advance=lambda: called.append(None))
    assert len(called) == 200 * synthetic.sweeps(10) == 600
    alone = synthetic.run(seeds=4, iterations=200)
    for cell, curve, first in zip(results.cells, results.curves, alone.curves, strict=True):
        np.testing.assert_array_equal(curve.one_run, first.one_run)  # from the first sweep
        assert not np.array_equal(curve.mean, first.mean)
        assert (cell.hit_share * 10) % 1 == pytest.approx(0, abs=1e-9)


def test_runs_are_reproducible() -> None:
    assert synthetic.run(seeds=2, iterations=20).to_json() == synthetic.run(seeds=2, iterations=20).to_json()


def test_shifted_quadratic_has_its_own_solution_and_floors() -> None:
    problem = synthetic.SHIFTED
    solution = torch.full((1, 5), problem.shift / (1 + problem.curvature), dtype=torch.float64)
    assert problem.error(solution).item() < 1e-20
    start = torch.full((1, 5), synthetic.START, dtype=torch.float64)
    gradient = (1 + problem.curvature) * synthetic.START - problem.shift
    assert problem.error(start).item() == pytest.approx(5 * gradient**2)
    assert problem.initial_gap == pytest.approx(5 * gradient**2 / (2 * (1 + problem.curvature)))
    results = synthetic.run(seeds=40, iterations=2000, problem=problem)
    for cell in results.cells:
        if cell.M is not None and cell.gamma is not None and cell.gamma >= 0.01 and cell.M <= 100:
            assert cell.stationary == pytest.approx(cell.closed_form, rel=0.25)


def test_plan_cells_use_the_plan_of_their_noise_level(results: synthetic.Results) -> None:
    for sigma in synthetic.SIGMAS:
        cell = results.cells[results.find("plan", sigma)]
        gap = synthetic.PAPER.initial_gap
        plan = theory.plan(smoothness=1.0, noise_variance=sigma**2, initial_gap=gap, horizon=1000)
        assert (cell.M, cell.gamma) == (plan.M, plan.gamma)
        assert cell.stationary <= plan.guarantee


def test_decreasing_weights_average_all_gradients() -> None:
    """γ_k = 1/(k + 2) makes m_k the mean of the first k + 1 gradients, so the error is σ²/K while x hardly moves."""
    results = synthetic.run(seeds=200, iterations=400)
    for sigma in synthetic.SIGMAS:
        curve = results.curves[results.find("decreasing", sigma)]
        assert curve.mean[-1] == pytest.approx(sigma**2 / 400, rel=0.25)


def test_auto_runs_without_cells() -> None:
    results = synthetic.run_auto(seeds=2, iterations=300)
    assert [cell.method for cell in results.cells] == ["auto"] * 3
    for cell, curve in zip(results.cells, results.curves, strict=True):
        assert cell.M is cell.gamma is cell.closed_form is None
        assert len(curve.mean) == 300
        assert curve.mean[-1] < cell.sigma**2 / 4


def test_records_keep_cells_and_thinned_curves(results: synthetic.Results) -> None:
    restored = synthetic.Results.from_record(results.to_record())
    assert restored.cells == results.cells
    assert restored.problem == results.problem
    for thin, full in zip(restored.curves, results.curves, strict=True):
        assert 50 < len(thin.iterations) <= synthetic.CURVE_POINTS
        assert thin.iterations[0] == 1
        assert thin.iterations[-1] == 1000
        np.testing.assert_array_equal(thin.mean, full.mean[thin.iterations - 1])
    joined = results.joined(synthetic.run_auto(seeds=1, iterations=20))
    assert math.isfinite(joined.cells[joined.best("auto", 5.0)].stationary)
