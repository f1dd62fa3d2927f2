"""Fixed points of the adaptive methods are minimisers of f + ψ, as scikit-learn finds them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from benchmarks.l1_logistic import l1_logistic_regression
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import Lasso, MultiTaskLasso
from torch import Tensor
from torch.nn import Parameter

import proxmo

STEPS = 3000


def anneal(optimizer: torch.optim.Optimizer, x: Parameter, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Minimise with full gradients and an lr that falls to zero, as it must for a sign method to settle."""
    lr = optimizer.param_groups[0]["lr"]
    for k in range(STEPS):
        optimizer.param_groups[0]["lr"] = lr * (1 - k / STEPS)
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()
    return x.detach()


class NaiveAdamW(torch.optim.AdamW):
    """A plain soft threshold after AdamW, which is not the prox in Adam's metric."""

    strength = 0.0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(proxmo.L1(self.strength).prox(p, group["lr"]))


def lasso() -> tuple[Callable[[Tensor], Tensor], float, Tensor]:
    """Return f, the strength and the minimiser on features of different scales, on which Adam's metric matters."""
    inputs, targets = load_diabetes(return_X_y=True)
    inputs = inputs / inputs.std(0) * np.geomspace(0.3, 3.0, inputs.shape[1])
    targets = (targets - targets.mean()) / targets.std()
    strength = 0.1
    solution = Lasso(strength, fit_intercept=False, tol=1e-14, max_iter=100_000).fit(inputs, targets).coef_
    data, wanted = torch.from_numpy(inputs), torch.from_numpy(targets)
    return (lambda x: (data @ x - wanted).square().mean() / 2), strength, torch.from_numpy(solution)


def logistic() -> tuple[Callable[[Tensor], Tensor], float, Tensor]:
    inputs, labels = load_breast_cancer(return_X_y=True)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    strength, count = 0.02, len(labels)
    model = l1_logistic_regression(
        strength, count, solver="liblinear", fit_intercept=False, tol=1e-12, max_iter=100_000
    )
    solution = model.fit(inputs, labels).coef_[0]
    data, signs = torch.from_numpy(inputs), torch.from_numpy(2.0 * labels - 1)
    return (lambda x: torch.nn.functional.softplus(-signs * (data @ x)).mean()), strength, torch.from_numpy(solution)


PROBLEMS = {"lasso": lasso, "logistic": logistic}
METHODS: dict[str, Callable[[Parameter, proxmo.Penalty], proxmo.ProxOptimizer]] = {
    "adamw": lambda x, penalty: proxmo.ProxAdamW([x], 0.3, weight_decay=0.0, penalty=penalty),
    "lion": lambda x, penalty: proxmo.ProxLion([x], 0.03, penalty=penalty),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_l1_solution_is_that_of_scikit_learn(problem: str, method: str) -> None:
    loss, strength, solution = PROBLEMS[problem]()
    penalty = proxmo.L1(strength)
    x = Parameter(torch.zeros_like(solution))
    found = anneal(METHODS[method](x, penalty), x, loss)
    best = float(loss(solution) + penalty.value(solution))
    assert float(loss(found) + penalty.value(found)) - best < 1e-6 * best
    assert torch.equal(found != 0, solution.abs() > 1e-7)
    assert 0 < int((found == 0).sum()) < len(found)


@pytest.mark.parametrize("metric", ["element", "block"])
def test_group_solution_is_that_of_scikit_learn(metric: proxmo.optim.moments.Metric) -> None:
    """A group for each feature, shared by two targets."""
    inputs, labels = load_diabetes(return_X_y=True)
    inputs = inputs / inputs.std(0) * np.geomspace(0.3, 3.0, inputs.shape[1])
    targets = np.stack([labels, labels**2, np.sqrt(labels)], 1)
    targets = (targets - targets.mean(0)) / targets.std(0)
    strength = 0.2
    fitted = MultiTaskLasso(strength, fit_intercept=False, tol=1e-14, max_iter=100_000).fit(inputs, targets)
    solution = torch.from_numpy(fitted.coef_)
    data, wanted = torch.from_numpy(inputs), torch.from_numpy(targets)
    penalty = proxmo.GroupL2(strength, dim=1)

    def loss(x: Tensor) -> Tensor:
        return (data @ x.T - wanted).square().sum(1).mean() / 2

    x = Parameter(torch.zeros_like(solution))
    optimizer = proxmo.ProxAdamW([x], 0.3, weight_decay=0.0, penalty=penalty, metric=metric)
    found = anneal(optimizer, x, loss)
    best = float(loss(solution) + penalty.value(solution))
    assert abs(float(loss(found) + penalty.value(found)) / best - 1) < 1e-6
    assert torch.equal(found.any(0), (solution != 0).any(0))
    assert 0 < int(found.any(0).sum()) < found.shape[1]


def test_soft_threshold_after_adam_solves_another_problem() -> None:
    loss, strength, solution = lasso()
    x = Parameter(torch.zeros_like(solution))
    optimizer = NaiveAdamW([x], 0.3, weight_decay=0.0)
    optimizer.strength = strength
    found = anneal(optimizer, x, loss)
    penalty = proxmo.L1(strength)
    best = float(loss(solution) + penalty.value(solution))
    gap = float(loss(found) + penalty.value(found)) / best - 1
    assert math.isfinite(gap)
    assert gap > 1e-3
    assert not torch.equal(found != 0, solution.abs() > 1e-7)
