"""A small finite-sum problem for the two-point methods: in torch, and with a numpy reference of each method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

import proxmo
from proxmo.optim.recursive import RecursiveOptimizer

Array = NDArray[np.float64]
Gradient = Callable[[Array, Array], Array]
DOUBLE = torch.float64
LR, STRENGTH, STEPS = 0.3, 0.02, 25

generator = np.random.default_rng(0)
INPUTS = generator.normal(size=(40, 5))
TARGETS = np.where(INPUTS @ generator.normal(size=5) > 0, 1.0, -1.0)
START = generator.normal(size=5)
BATCHES = [generator.integers(40, size=4) for _ in range(2 * STEPS)]
ALL = np.arange(40)


# References in numpy: f is the mean of the non-convex 1 − tanh(y·<a, x>), ψ an ℓ1 penalty.


def gradient(x: Array, rows: Array) -> Array:
    a, y = INPUTS[rows], TARGETS[rows]
    return -(y / np.cosh(y * (a @ x)) ** 2) @ a / len(rows)


def soft(x: Array) -> Array:
    return np.sign(x) * np.maximum(np.abs(x) - LR * STRENGTH, 0)


def spiderboost(period: int) -> Iterator[Array]:
    x, before, v = START, START, START
    for k, rows in enumerate(BATCHES[:STEPS]):
        v = gradient(x, ALL) if k % period == 0 else v + gradient(x, rows) - gradient(before, rows)
        x, before = soft(x - LR * v), x
        yield x


def hybrid(beta: float, gamma: float) -> Iterator[Array]:
    x, before, v = START, START, gradient(START, BATCHES[0])
    for k in range(STEPS):
        if k > 0:
            one, other = BATCHES[2 * k], BATCHES[2 * k + 1]
            v = beta * (v + gradient(x, one) - gradient(before, one)) + (1 - beta) * gradient(x, other)
        x, before = (1 - gamma) * x + gamma * soft(x - LR * v), x
        yield x


def storm(beta: float) -> Iterator[Array]:
    x, before, d = START, START, gradient(START, BATCHES[0])
    for k, rows in enumerate(BATCHES[:STEPS]):
        if k > 0:
            d = gradient(x, rows) + (1 - beta) * (d - gradient(before, rows))
        x, before = soft(x - LR * d), x
        yield x


def vanilla(batches: list[Array]) -> Iterator[Array]:
    x = START
    for rows in batches:
        x = soft(x - LR * gradient(x, rows))
        yield x


# The same problem in torch.


def closure_of(x: Parameter, rows: Array) -> Callable[[], float]:
    a, y = torch.tensor(INPUTS[rows]), torch.tensor(TARGETS[rows])

    def closure() -> float:
        loss = (1 - torch.tanh(y * (a @ x))).mean()
        loss.backward()  # without zero_grad: the optimizer clears gradients between evaluations
        return loss.item()

    return closure


def take_step(optimizer: RecursiveOptimizer, x: Parameter, k: int) -> None:
    if isinstance(optimizer, proxmo.ProxSpiderBoost):
        optimizer.step(closure_of(x, BATCHES[k]), closure_of(x, ALL))
    elif isinstance(optimizer, proxmo.ProxHybridSGD):
        optimizer.step(closure_of(x, BATCHES[2 * k]), closure_of(x, BATCHES[2 * k + 1]))
    elif isinstance(optimizer, proxmo.ProxSTORM):
        optimizer.step(closure_of(x, BATCHES[k]))


def step_on(optimizer: RecursiveOptimizer, closure: Any, other: Any = None) -> None:
    """Take a step, with ``closure`` for the second sample too unless ``other`` is given."""
    if isinstance(optimizer, proxmo.ProxHybridSGD):
        optimizer.step(closure, other or closure)
    else:
        optimizer.step(closure)  # type: ignore[call-arg]


METHODS: dict[str, Callable[..., RecursiveOptimizer]] = {
    "spiderboost": lambda params, **options: proxmo.ProxSpiderBoost(params, LR, 6, **options),
    "hybrid": lambda params, **options: proxmo.ProxHybridSGD(params, LR, 0.8, 0.7, **options),
    "storm": lambda params, **options: proxmo.ProxSTORM(params, LR, 0.8, **options),
}
REFERENCES = {
    "spiderboost": lambda: spiderboost(6),
    "hybrid": lambda: hybrid(0.8, 0.7),
    "storm": lambda: storm(0.2),
}
each_method = pytest.mark.parametrize("name", METHODS)


def fresh(name: str, **options: Any) -> tuple[Parameter, RecursiveOptimizer]:
    x = Parameter(torch.tensor(START))
    return x, METHODS[name]([x], penalty=proxmo.L1(STRENGTH), **options)
