"""The benchmarks of AutoProxSGD: their grid is ProxSGD's, references are right, and records are not made twice."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import auto, auto_network
from benchmarks.auto_methods import CELLS, OWN, PEERS, Weights, make, missing_packages
from benchmarks.l1_logistic import l1_logistic_regression
from benchmarks.regressions import Regression, regressions
from benchmarks.targets_tasks import TASKS, Folders, Task
from sklearn.linear_model import Lasso, MultiTaskLasso
from torch import nn
from torch.nn import Parameter

from proxmo import L1, AutoProxSGD, ProxOptimizer, ProxSGD
from proxmo.experiments.problems import Problem, Quadratic, RobustRegression

REGRESSIONS = {problem.name: problem for problem in regressions([])}
DIGITS = TASKS["digits"](Folders())


def last_error(problem: Problem, x: Parameter, optimizer: ProxOptimizer, steps: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x.grad = problem.gradient(x.detach(), problem.sample(1, generator))
        optimizer.step()
    return float(problem.error(x.detach()))


@pytest.mark.parametrize("kind", ["l1", "linf1"])
def test_grid_runs_prox_sgd(kind: str) -> None:
    problem = RobustRegression("test", kind, batch=1)
    error, M, gamma = auto.grid_error(problem, steps=auto.STRIDE, seeds=1)
    x = Parameter(problem.start(1))
    optimizer = ProxSGD([x], 1 / M, 1 - gamma, problem.penalty)
    assert last_error(problem, x, optimizer, auto.STRIDE, seed=1) == pytest.approx(error, rel=1e-9)


def test_error_is_that_of_the_last_tenth() -> None:
    problem = RobustRegression("test", "l1", batch=1)
    found = []
    for steps in (380, 400):
        x = Parameter(problem.start(1))
        found.append(last_error(problem, x, AutoProxSGD([x], problem.penalty), steps, seed=100))
    assert auto.auto_error(problem, steps=400, seed=0) == pytest.approx(sum(found) / 2, rel=1e-9)


@pytest.mark.parametrize("name", ["least squares, ℓ1, diabetes", "least squares, ℓ1, breast-cancer"])
def test_reference_of_least_squares_is_the_lasso(name: str) -> None:
    problem = REGRESSIONS[name]
    lasso = Lasso(alpha=problem.penalty.strength, fit_intercept=False, tol=1e-14, max_iter=100_000)
    check_reference(problem, lasso.fit(problem.inputs.numpy(), problem.targets[:, 0].numpy()).coef_[:, None])


def test_reference_of_grouped_least_squares_is_the_multi_task_lasso() -> None:
    problem = REGRESSIONS["least squares, ℓ2,1, wine"]
    lasso = MultiTaskLasso(alpha=problem.penalty.strength, fit_intercept=False, tol=1e-14, max_iter=100_000)
    check_reference(problem, lasso.fit(problem.inputs.numpy(), problem.targets.numpy()).coef_.T)


def test_reference_of_logistic_regression_is_that_of_scikit_learn() -> None:
    problem = REGRESSIONS["logistic, ℓ1, breast-cancer"]
    model = l1_logistic_regression(
        problem.penalty.strength,
        len(problem.inputs),
        solver="liblinear",
        fit_intercept=False,
        tol=1e-10,
        max_iter=10_000,
    )
    check_reference(problem, model.fit(problem.inputs.numpy(), problem.targets[:, 0].numpy()).coef_.T)


def check_reference(problem: Regression, solution: object) -> None:
    gap = float(problem.error(torch.as_tensor(solution)[None]))
    assert abs(gap) < 1e-7 * float(problem.objective(problem.start(1)))


@pytest.mark.parametrize("problem", REGRESSIONS.values(), ids=REGRESSIONS.keys())
def test_gradients_are_those_of_the_objective(problem: Regression) -> None:
    x = torch.randn(problem.start(1).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    (smooth,) = problem.objective(x) - problem.penalty.value(x)
    (expected,) = torch.autograd.grad(smooth, x)
    torch.testing.assert_close(problem.full_gradient(x.detach()), expected)
    sample = problem.sample(1, torch.Generator().manual_seed(0))
    assert problem.gradient(x.detach(), sample).shape == x.shape


def test_small_problems_are_compared_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "problems", lambda: [RobustRegression("robust", "l1", batch=8)])
    monkeypatch.setattr(auto, "regressions", lambda files: [REGRESSIONS["logistic, ℓ1, breast-cancer"]])
    arguments = ["--samples", "100", "--seeds", "2", "--ablation", "--out", str(tmp_path)]
    auto.main(arguments)
    assert capsys.readouterr().out.count("min left") == 2 * (1 + len(auto.VARIANTS))
    table = (tmp_path / "ablation.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[0][2:] for line in table[2:]] == list(auto.VARIANTS)
    auto.main(arguments)
    assert "min left" not in capsys.readouterr().out


def test_variants_of_the_rule_differ() -> None:
    problem = Quadratic("noisy", [1.0, 3.0], shift=2.0, strength=0.1, sigma=5.0)
    errors = set()
    for variant in auto.VARIANTS:
        run = auto.Run("noisy", variant, steps=200, seeds=1)
        errors.add(auto.perform(run, {"noisy": problem}).error)
    assert len(errors) == len(auto.VARIANTS)


def small_task(steps: int = 60) -> Task:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))

    return replace(DIGITS, make=network, steps=steps)


INSTALLED = [name for name, peer in PEERS.items() if peer.package not in missing_packages()]


@pytest.mark.parametrize("method", [*OWN, "constant, lr 1, momentum 0.9", "cosine, lr 1, momentum 0.9", *INSTALLED])
def test_every_method_trains(method: str) -> None:
    value, score, zeros = auto_network.train(small_task(), L1(1e-3), method, seed=0)
    before = 2.3 + 0.06
    assert value < before
    assert score > 0.3
    assert 0 <= zeros < 1


@pytest.mark.parametrize("method", [name for name in INSTALLED if not name.startswith("schedule-free")])
def test_peers_end_at_a_stationary_point_of_the_penalised_problem(method: str) -> None:
    """½‖x − (3, 0.2)‖² + ‖x‖₁ has its minimum at (2, 0), which needs a prox with the right step."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0]]))
    weights = Weights(model, L1(1.0))
    running = make(method, weights, 1000)
    for _ in range(1000):
        running.step((model.weight - torch.tensor([[3.0, 0.2]])).square().sum() / 2)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[2.0, 0.0]]), rtol=0, atol=0.02)


def test_diverged_run_is_recorded(tmp_path: Path) -> None:
    value, score, zeros = auto_network.train(small_task(), L1(1e-3), "constant, lr 10, momentum 0", seed=0)
    assert math.isnan(value) == math.isnan(score) == math.isnan(zeros)


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(auto_network.TASKS, "digits", lambda folders: small_task(20))


@pytest.mark.usefixtures("small_grid")
def test_networks_are_compared_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["constant, lr 0.1, momentum 0.9", "constant, lr 1, momentum 0.9", "cosine, lr 1, momentum 0.9"]
    assert set(cells) < set(CELLS)
    arguments = ["--tasks", "digits", "--methods", "AutoProxSGD", *cells, "--seeds", "2", "--out", str(tmp_path)]
    auto_network.main(arguments)
    assert capsys.readouterr().out.count("min left") == 4 + 3
    table = (tmp_path / "auto_network.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[1:3] for line in table[2:]] == [
        ["constant, lr 1, momentum 0.9", "2"],
        ["cosine, lr 1, momentum 0.9", "2"],
        ["AutoProxSGD", "2"],
        ["AutoProxSGD", ""],
    ]
    records = json.loads((tmp_path / "auto_network.json").read_text(encoding="utf-8"))
    assert len(records) == 7
    assert (tmp_path / "auto_network.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "records" / "digits-AutoProxSGD-1.json").unlink()
    auto_network.main(arguments)
    assert "[1/1] digits, AutoProxSGD, seed 1: F" in capsys.readouterr().out


def test_report_needs_records(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no records"):
        auto_network.main(["--tasks", "digits", "--report-only", "--out", str(tmp_path)])
