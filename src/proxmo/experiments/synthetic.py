"""The synthetic quadratic (section 8.1): where vanilla stalls at the level of the noise and momentum does not.

f(x) = L/2·‖x‖², ψ(x) = a/2·‖x‖² with a large, and gradients of f with Gaussian noise of total variance σ²; a batch of b
divides the variance by b. All cells of the grid, all σ and all seeds run at once: each cell is a parameter group of one
`ProxSGD`, its parameter holds the runs of that cell for every σ and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from proxmo import ProxSGD, SquaredL2, theory
from proxmo.experiments.threads import one_thread

DIMENSION = 5
SMOOTHNESS = 1.0
CURVATURE = 1e4
SIGMAS = (5.0, 25.0, 125.0)
TOLERANCE = 0.02
ITERATIONS = 10_000
M_GRID = (1e0, 1e1, 1e2, 1e3, 1e4)
GAMMA_GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
BATCHES = (1, 16, 64)
START = 1e-4  # each coordinate; the paper gives no start. ‖∇F‖² = 5: below all σ², above the tolerance


@dataclass(frozen=True)
class Cell:
    """One setting of the grid."""

    method: Literal["vanilla", "momentum"]
    M: float
    gamma: float
    batch: int


@dataclass(frozen=True)
class CellResult(Cell):
    """What a cell did at one noise level."""

    sigma: float
    hit_share: float
    """The share of seeds whose ‖∇F‖² was at or below the tolerance at some iteration."""
    median_samples: float | None
    """Gradient samples until then, the median over seeds; ``None`` if fewer than half of them got there."""
    stationary: float
    """Mean of ‖∇F‖² over seeds and the last tenth of the iterations."""
    closed_form: float
    """What theory gives for that in the limit of many iterations."""


@dataclass(frozen=True)
class Curve:
    """‖∇F‖² after each iteration."""

    one_run: NDArray[np.float64]
    mean: NDArray[np.float64]


@dataclass(frozen=True)
class Results:
    """The whole grid: results and curves in the same order."""

    seeds: int
    iterations: int
    cells: list[CellResult]
    curves: list[Curve]

    def find(self, method: str, sigma: float, **settings: float) -> int:
        """The index of the first cell with these settings."""
        return self._indices(method, sigma, **settings)[0]

    def best(self, method: str, sigma: float, batch: int = 1) -> int:
        """The index of the tuned cell: the one with the smallest error at the end."""
        return min(self._indices(method, sigma, batch=batch), key=lambda i: self.cells[i].stationary)

    def _indices(self, method: str, sigma: float, **settings: float) -> list[int]:
        wanted = {"method": method, "sigma": sigma, **settings}
        return [i for i, cell in enumerate(self.cells) if wanted.items() <= asdict(cell).items()]

    def to_json(self) -> dict[str, Any]:
        """Every number of the table, for programs."""
        problem = {"dimension": DIMENSION, "smoothness": SMOOTHNESS, "curvature": CURVATURE, "start": START}
        settings = {"seeds": self.seeds, "iterations": self.iterations, "tolerance": TOLERANCE}
        return {**problem, **settings, "cells": [asdict(cell) for cell in self.cells]}


def grid() -> list[Cell]:
    """All settings that the paper tries: M and γ for momentum, M and the batch size for vanilla."""
    momentum = [Cell("momentum", M, gamma, batch=1) for M in M_GRID for gamma in GAMMA_GRID]
    vanilla = [Cell("vanilla", M, gamma=1.0, batch=batch) for M in M_GRID for batch in BATCHES]
    return momentum + vanilla


@one_thread()
def run(seeds: int = 50, iterations: int = ITERATIONS, advance: Callable[[], None] = lambda: None) -> Results:
    """Run the whole grid.

    Args:
        seeds: independent runs per cell and noise level; all cells see the same noise, so that they compare in pairs.
        iterations: steps of each run.
        advance: called after each iteration, for a progress bar.

    >>> results = run(seeds=2, iterations=100)
    >>> len(results.cells)
    120
    """
    cells = grid()
    points = torch.full((len(cells), len(SIGMAS), seeds, DIMENSION), START, dtype=torch.float64)
    gradients = torch.empty_like(points)
    groups: list[dict[str, Any]] = []
    for cell, x, g in zip(cells, points, gradients, strict=True):
        param = Parameter(x)  # shares its memory with `points`, as its gradient does with `gradients`
        param.grad = g
        groups.append({"params": [param], "lr": 1 / cell.M, "momentum": 1 - cell.gamma})
    optimizer = ProxSGD(groups, penalty=SquaredL2(CURVATURE))

    deviations = torch.tensor([[sigma / math.sqrt(cell.batch * DIMENSION) for sigma in SIGMAS] for cell in cells])
    noise_scale = deviations[:, :, None, None].double()
    noise = torch.Generator().manual_seed(0)
    one_run = torch.empty(iterations, len(cells), len(SIGMAS), dtype=torch.float64)
    mean = torch.empty_like(one_run)
    first_hit = torch.full(points.shape[:3], math.inf, dtype=torch.float64)
    for k in range(iterations):
        torch.mul(torch.randn(seeds, DIMENSION, generator=noise, dtype=torch.float64), noise_scale, out=gradients)
        gradients.add_(points, alpha=SMOOTHNESS)
        optimizer.step()
        errors = points.square().sum(-1).mul_((SMOOTHNESS + CURVATURE) ** 2)
        one_run[k], mean[k] = errors[:, :, 0], errors.mean(-1)
        first_hit.clamp_(max=torch.where(errors <= TOLERANCE, k + 1.0, math.inf))
        advance()

    final = mean[-max(iterations // 10, 1) :].mean(0)
    results, curves = [], []
    for i, cell in enumerate(cells):
        for j, sigma in enumerate(SIGMAS):
            samples = float(first_hit[i, j].quantile(0.5, interpolation="higher")) * cell.batch
            variance = sigma**2 / cell.batch
            results.append(
                CellResult(
                    **asdict(cell),
                    sigma=sigma,
                    hit_share=float(first_hit[i, j].isfinite().double().mean()),
                    median_samples=samples if math.isfinite(samples) else None,
                    stationary=float(final[i, j]),
                    closed_form=theory.quadratic_floor(SMOOTHNESS, CURVATURE, variance, M=cell.M, gamma=cell.gamma),
                )
            )
            curves.append(Curve(one_run[:, i, j].numpy(), mean[:, i, j].numpy()))
    return Results(seeds, iterations, results, curves)
