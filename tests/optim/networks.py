"""A small network with its optimizer and training loop, for tests of the optimizer contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import proxmo


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))


def make(net: nn.Module, **options: Any) -> proxmo.ProxSGD:
    """Make an optimizer with weights and biases in separate parameter groups, as users do."""
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": weights, "penalty": proxmo.GroupLInf(0.3)}, {"params": biases}]
    return proxmo.ProxSGD(groups, **{"lr": 0.05, "momentum": 0.9, **options})


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for seed in steps:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(8, 3, 4, 4, generator=generator), torch.randint(5, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
