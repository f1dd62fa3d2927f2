"""The default lr trains: every method gets near the solution of a regression with standardized features."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import proxmo

MAKE: dict[str, Callable[[Parameter], proxmo.ProxOptimizer]] = {
    "prox_sgd": lambda x: proxmo.ProxSGD([x]),
    "storm": lambda x: proxmo.ProxSTORM([x]),
    "hybrid": lambda x: proxmo.ProxHybridSGD([x]),
    "spiderboost": lambda x: proxmo.ProxSpiderBoost([x]),
    "inexact": lambda x: proxmo.InexactProxSGD([x], inner=proxmo.InnerSGD(steps=2, lr=0.05)),
}


@pytest.mark.parametrize("name", MAKE)
def test_default_lr_solves_a_regression(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(500, 5, generator=generator, dtype=torch.float64)
    solution = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    x = Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = MAKE[name](x)

    def closure(rows: Tensor) -> Callable[[], float]:
        def evaluate() -> float:
            optimizer.zero_grad()
            loss = (inputs[rows] @ (x - solution)).square().mean() / 2
            loss.backward()
            return loss.item()

        return evaluate

    def psi() -> float:
        optimizer.zero_grad()
        (0 * x).sum().backward()
        return 0.0

    def sample() -> Tensor:
        return torch.randint(500, (32,), generator=generator)

    others = {"hybrid": sample, "spiderboost": lambda: torch.arange(500)}
    for _ in range(200):
        if name == "inexact":
            optimizer.step(closure(sample()), psi)  # type: ignore[call-arg]
        elif name in others:
            optimizer.step(closure(sample()), closure(others[name]()))  # type: ignore[call-arg]
        else:
            optimizer.step(closure(sample()))
    assert (x - solution).norm() < 0.01 * solution.norm()
