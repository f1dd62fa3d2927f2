"""A noisy f and a smooth ψ for tests of the inexact prox."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import Parameter

import proxmo

DOUBLE = torch.float64


def noisy_f(x: Parameter, seed: int) -> Callable[[], float]:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)

    def closure() -> float:
        loss = (x - 2 + noise).square().sum() / 2
        loss.backward()
        return loss.item()

    return closure


def smooth_psi(x: Parameter, penalty: proxmo.Penalty, *, with_value: bool = True) -> Callable[[], float | None]:
    def closure() -> float | None:
        value = penalty.value(x)
        value.backward()
        return value.item() if with_value else None

    return closure


def start() -> Parameter:
    return Parameter(torch.linspace(-3, 3, 6, dtype=DOUBLE).reshape(2, 3))
