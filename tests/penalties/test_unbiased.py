"""MCP and SCAD with their default concavity recover few large coefficients that ℓ1 shrinks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import proxmo

TRUE = torch.tensor([3.0, -2.0, 2.0, -1.5, 1.0] + [0.0] * 45, dtype=torch.float64)


def solve(penalty: proxmo.Penalty) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 50, generator=generator, dtype=torch.float64)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0, unbiased=False)
    targets = inputs @ TRUE + torch.randn(200, generator=generator, dtype=torch.float64)
    lr = 200 / float(torch.linalg.matrix_norm(inputs, 2)) ** 2
    x = torch.zeros(50, dtype=torch.float64)
    for _ in range(500):
        x = penalty.prox(x - lr * inputs.T @ (inputs @ x - targets) / 200, lr)
    return x


@pytest.mark.parametrize("make", [proxmo.MCP, proxmo.SCAD])
def test_default_concavity_beats_l1_at_any_strength(make: type[proxmo.MCP] | type[proxmo.SCAD]) -> None:
    errors = [float((solve(proxmo.L1(s)) - TRUE).square().sum()) for s in (0.02, 0.05, 0.1, 0.2, 0.3)]
    found = solve(make(0.25))
    assert found.count_nonzero() == 5
    assert (found - TRUE).square().sum() < 0.6 * min(errors)
