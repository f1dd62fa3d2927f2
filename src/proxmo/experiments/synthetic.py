"""The synthetic quadratic (section 8.1): the vanilla method stalls at the noise level, momentum does not.

f(x) = L/2·‖x‖² − <b, x>, ψ(x) = a/2·‖x‖², and gradients of f have Gaussian noise of total variance σ²; a batch of n
divides the variance by n. In the paper b = 0 and a is large, so that ∇f is nearly constant and nearly zero along the
whole path; on the shifted quadratic it is neither. All cells of the grid, all σ and many seeds run at once: one tensor
takes the steps of `ProxSGD` with the lr and momentum of each cell. Three methods are not in the paper: the plan of the
sharpened theory, γ_k = 1/(k + 2), and `AutoProxSGD`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from proxmo import AutoProxSGD, SquaredL2, theory
from proxmo.experiments.experiment import Experiment, Options, Progress
from proxmo.experiments.report import Section
from proxmo.experiments.seeds import as_text
from proxmo.experiments.store import Store, StoreError
from proxmo.experiments.threads import one_thread

DIMENSION = 5
SMOOTHNESS = 1.0
SIGMAS = (5.0, 25.0, 125.0)
TOLERANCE = 0.02
ITERATIONS = 10_000
M_GRID = (1e0, 1e1, 1e2, 1e3, 1e4)
GAMMA_GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
BATCHES = (1, 16, 64)
START = 1e-4  # coordinates of x₀, not given in the paper; ‖∇F(x₀)‖² = 5 is below all σ² and above the tolerance
DECREASING_M = 10.0  # for γ_k = 1/(k + 2); hardly matters when a ≫ M
SEEDS = 50
AUTO_SEEDS = 3  # for `AutoProxSGD`, whose runs are not batched
SEEDS_AT_ONCE = 100  # bounds the memory
CURVE_POINTS = 150  # per stored curve


class Quadratic(NamedTuple):
    """A quadratic problem, given by a (``curvature``) and by each coordinate of b (``shift``)."""

    curvature: float
    shift: float

    def error(self, x: torch.Tensor) -> torch.Tensor:
        """Return ‖∇F(x)‖²."""
        return x.mul(SMOOTHNESS + self.curvature).sub_(self.shift).square_().sum(-1)

    @property
    def initial_gap(self) -> float:
        """F(x₀) − F*."""
        total = SMOOTHNESS + self.curvature
        return total / 2 * DIMENSION * (START - self.shift / total) ** 2


PAPER = Quadratic(curvature=1e4, shift=0.0)
SHIFTED = Quadratic(curvature=1.0, shift=10.0)
PROBLEMS = {"paper": PAPER, "shifted": SHIFTED}

Method = Literal["vanilla", "momentum", "plan", "decreasing", "auto"]


@dataclass(frozen=True)
class Cell:
    """One setting; M and γ are ``None`` if they change during the run."""

    method: Method
    M: float | None
    gamma: float | None
    batch: int


@dataclass(frozen=True)
class CellResult(Cell):
    """The result of a cell at one noise level."""

    sigma: float
    hit_share: float
    """The share of seeds that reached the tolerance: ‖∇F‖² was at or below it at some iteration."""
    median_samples: float | None
    """Gradient samples to reach it, the median over seeds; ``None`` if fewer than half did."""
    stationary: float
    """The mean of ‖∇F‖² over seeds and the last tenth of the iterations."""
    closed_form: float | None
    """The limit of that mean, from theory; ``None`` if M or γ change."""


@dataclass(frozen=True)
class Curve:
    """‖∇F‖² at some iterations, counted from 1."""

    iterations: NDArray[np.int64]
    one_run: NDArray[np.float64]
    mean: NDArray[np.float64]

    def thinned(self) -> Curve:
        """Return a curve with fewer points, evenly spaced on a logarithmic axis."""
        last = len(self.iterations) - 1
        kept = np.unique(np.round(np.geomspace(1, last + 1, CURVE_POINTS)).astype(np.int64) - 1)
        return Curve(self.iterations[kept], self.one_run[kept], self.mean[kept])


@dataclass(frozen=True)
class Results:
    """The results of the whole grid; cells and curves are in the same order."""

    seeds: int
    iterations: int
    problem: Quadratic
    cells: list[CellResult]
    curves: list[Curve]

    def find(self, method: Method, sigma: float, **settings: float) -> int:
        """Return the index of the first cell with these settings."""
        return self.indices(method, sigma, **settings)[0]

    def best(self, method: Method, sigma: float, batch: int = 1) -> int:
        """Return the index of the cell with the smallest final error."""
        return min(self.indices(method, sigma, batch=batch), key=lambda i: self.cells[i].stationary)

    def indices(self, method: Method, sigma: float, **settings: float) -> list[int]:
        """Return the indices of all cells with these settings."""
        wanted = {"method": method, "sigma": sigma, **settings}
        return [i for i, cell in enumerate(self.cells) if wanted.items() <= vars(cell).items()]

    def joined(self, other: Results) -> Results:
        """Return these results together with others on the same problem."""
        return Results(self.seeds, self.iterations, self.problem, self.cells + other.cells, self.curves + other.curves)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers of the table."""
        problem = {"dimension": DIMENSION, "smoothness": SMOOTHNESS, **self.problem._asdict(), "start": START}
        settings = {
            "seeds": self.seeds, "auto_seeds": AUTO_SEEDS, "iterations": self.iterations, "tolerance": TOLERANCE,
        }  # fmt: skip
        return {**problem, **settings, "cells": [asdict(cell) for cell in self.cells]}

    def to_record(self) -> dict[str, Any]:
        """Return all that a report needs: `to_json` and thinned curves."""
        thinned = [curve.thinned() for curve in self.curves]
        curves = [
            {"iterations": c.iterations.tolist(), "one_run": c.one_run.tolist(), "mean": c.mean.tolist()}
            for c in thinned
        ]
        return {**self.to_json(), "curves": curves}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Results:
        """Invert `to_record`."""
        curves = [Curve(**{name: np.array(values) for name, values in curve.items()}) for curve in record["curves"]]
        cells = [CellResult(**cell) for cell in record["cells"]]
        problem = Quadratic(record["curvature"], record["shift"])
        return cls(record["seeds"], record["iterations"], problem, cells, curves)


def grid(problem: Quadratic, iterations: int) -> list[tuple[Cell, tuple[float, ...]]]:
    """Return all settings, the paper's and ours, each with the noise levels σ it is run at."""
    cells = [Cell("momentum", M, gamma, batch=1) for M in M_GRID for gamma in GAMMA_GRID]
    cells += [Cell("vanilla", M, gamma=1.0, batch=batch) for M in M_GRID for batch in BATCHES]
    cells += [Cell("decreasing", DECREASING_M, None, batch=1)]
    found: list[tuple[Cell, tuple[float, ...]]] = [(cell, SIGMAS) for cell in cells]
    for sigma in SIGMAS:
        gap = problem.initial_gap
        plan = theory.plan(smoothness=SMOOTHNESS, noise_variance=sigma**2, initial_gap=gap, horizon=iterations)
        found.append((Cell("plan", plan.M, plan.gamma, batch=1), (sigma,)))
    return found


@one_thread()
def run(
    seeds: int = SEEDS,
    iterations: int = ITERATIONS,
    problem: Quadratic = PAPER,
    advance: Callable[[], None] = lambda: None,
    first_seed: int = 0,
) -> Results:
    """Run the whole grid.

    Args:
        seeds: independent runs per cell and noise level; all cells see the same noise, so that comparisons are paired.
        iterations: steps of each run.
        problem: `PAPER` or `SHIFTED`.
        advance: called after every iteration of every sweep, for a progress bar.
        first_seed: determines the noise.

    >>> results = run(seeds=2, iterations=100)
    >>> len(results.cells)
    126
    """
    cells = grid(problem, iterations)
    noise = torch.Generator().manual_seed(first_seed)
    one_run = torch.empty(iterations, len(cells), len(SIGMAS), dtype=torch.float64)
    mean = torch.zeros_like(one_run)
    hits = torch.zeros_like(one_run)  # number of seeds that first reach the tolerance at each iteration
    for first in range(0, seeds, SEEDS_AT_ONCE):
        count = min(SEEDS_AT_ONCE, seeds - first)
        waiting = torch.ones(len(cells), len(SIGMAS), count, dtype=torch.bool)
        for k, errors in enumerate(_sweep(problem, [cell for cell, _ in cells], count, iterations, noise)):
            if first == 0:
                one_run[k] = errors[:, :, 0]
            mean[k] += errors.sum(-1) / seeds
            arrived = waiting & (errors <= TOLERANCE)
            waiting ^= arrived
            hits[k] += arrived.sum(-1)
            advance()

    results, curves = [], []
    for i, (cell, sigmas) in enumerate(cells):
        for j, sigma in enumerate(SIGMAS):
            if sigma in sigmas:
                results.append(_result(problem, cell, sigma, hits[:, i, j], seeds, mean[:, i, j]))
                steps = np.arange(1, iterations + 1)
                curves.append(Curve(steps, one_run[:, i, j].numpy(), mean[:, i, j].numpy()))
    return Results(seeds, iterations, problem, results, curves)


def sweeps(seeds: int) -> int:
    """Return the number of sweeps over all iterations that `run` needs for this many seeds."""
    return -(-seeds // SEEDS_AT_ONCE)


def _sweep(
    problem: Quadratic, cells: list[Cell], seeds: int, iterations: int, noise: torch.Generator
) -> Iterator[torch.Tensor]:
    """Run all cells at all noise levels with this many seeds; yield ‖∇F‖² after every iteration."""
    x = torch.full((len(cells), len(SIGMAS), seeds, DIMENSION), START, dtype=torch.float64)
    deviations = torch.tensor(
        [[sigma / math.sqrt(cell.batch * DIMENSION) for sigma in SIGMAS] for cell in cells], dtype=torch.float64
    )
    lr = torch.tensor([1 / (cell.M or math.nan) for cell in cells], dtype=torch.float64)
    gamma = torch.tensor([cell.gamma or math.nan for cell in cells], dtype=torch.float64)
    decreasing = gamma.isnan()
    deviations, lr, weight = deviations[:, :, None, None], lr[:, None, None, None], gamma[:, None, None, None]
    average, gradient = torch.empty_like(x), torch.empty_like(x)
    for k in range(iterations):
        torch.mul(torch.randn(seeds, DIMENSION, generator=noise, dtype=torch.float64), deviations, out=gradient)
        gradient.add_(x, alpha=SMOOTHNESS).sub_(problem.shift)
        weight[decreasing] = 1 / (k + 1)  # γ_{k−1} = 1/(k + 1) is the weight of the gradient at step k
        if k == 0:
            average.copy_(gradient)  # so that m₀ = g₀
        _step(x, average, gradient, weight, lr, problem)
        yield problem.error(x)


def _step(
    x: torch.Tensor,
    average: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    lr: torch.Tensor,
    problem: Quadratic,
) -> None:
    """Take a step of `ProxSGD` in place, with a weight γ and an lr per cell: average, move, prox of a/2·‖x‖²."""
    average.lerp_(gradient, weight)
    SquaredL2(problem.curvature).prox_([x.addcmul_(average, lr, value=-1)], lr)


@one_thread()
def run_auto(
    seeds: int = AUTO_SEEDS,
    iterations: int = ITERATIONS,
    problem: Quadratic = PAPER,
    advance: Callable[[], None] = lambda: None,
    first_seed: int = 0,
) -> Results:
    """Run `AutoProxSGD`, which has no settings to tune.

    Args:
        seeds, iterations, problem: as for `run`.
        advance: called after every run.
        first_seed: the first of the seeds.
    """
    results, curves = [], []
    for sigma in SIGMAS:
        errors = torch.empty(seeds, iterations, dtype=torch.float64)
        for seed in range(seeds):
            errors[seed] = _auto_errors(problem, sigma, first_seed + seed, iterations)
            advance()
        below = (errors <= TOLERANCE).double()
        hits = torch.bincount(below.argmax(1)[below.any(1)], minlength=iterations)
        results.append(_result(problem, Cell("auto", None, None, batch=1), sigma, hits, seeds, errors.mean(0)))
        curves.append(Curve(np.arange(1, iterations + 1), errors[0].numpy(), errors.mean(0).numpy()))
    return Results(seeds, iterations, problem, results, curves)


def _auto_errors(problem: Quadratic, sigma: float, seed: int, samples: int) -> torch.Tensor:
    """Return ‖∇F‖² after each sample of one run."""
    x = Parameter(torch.full((DIMENSION,), START, dtype=torch.float64))
    optimizer = AutoProxSGD([x], SquaredL2(problem.curvature))
    generator = torch.Generator().manual_seed(seed)
    errors = torch.empty(samples, dtype=torch.float64)
    for k in range(samples):
        noise = torch.randn(DIMENSION, generator=generator, dtype=torch.float64) * (sigma / math.sqrt(DIMENSION))
        x.grad = SMOOTHNESS * x.detach() - problem.shift + noise
        optimizer.step()
        errors[k] = problem.error(x.detach())
    return errors


def _result(
    problem: Quadratic, cell: Cell, sigma: float, hits: torch.Tensor, seeds: int, mean: torch.Tensor
) -> CellResult:
    """Summarise one cell from the number of first hits and the mean error at each iteration."""
    arrived = hits.cumsum(0)
    half = int((arrived < (seeds + 1) // 2).sum())  # iterations before half of the seeds have reached the tolerance
    closed_form = None
    if cell.M is not None and cell.gamma is not None:
        closed_form = theory.quadratic_floor(
            SMOOTHNESS, problem.curvature, sigma**2 / cell.batch, M=cell.M, gamma=cell.gamma
        )
    return CellResult(
        **asdict(cell),
        sigma=sigma,
        hit_share=float(arrived[-1]) / seeds,
        median_samples=float(half + 1) * cell.batch if half < len(hits) else None,
        stationary=float(mean[-max(len(mean) // 10, 1) :].mean()),
        closed_form=closed_form,
    )


class Synthetic(Experiment):
    """The experiment of section 8.1, and the same on the shifted quadratic."""

    name = "synthetic"
    title = "A noisy quadratic (section 8.1)"

    def check(self, options: Options) -> None:
        """Do nothing: the experiment needs no data."""

    def arguments(self, options: Options) -> list[str]:
        seeds = [] if options.seeds is None else [f"--seeds {options.seeds}"]
        return seeds + ([f"--first-seed {options.first_seed}"] if options.first_seed else [])

    def conditions(self, options: Options) -> dict[str, Any]:
        return {"seeds": [as_text(options.first_seed, options.seeds or SEEDS)]}

    def run(self, options: Options, store: Store, progress: Progress) -> None:
        if options.only is not None and options.only[0] > 1:
            return  # all of it is one job, the first
        seeds = options.seeds or SEEDS
        auto_runs = AUTO_SEEDS * len(SIGMAS)
        share = ITERATIONS // auto_runs  # on the progress bar, all runs of `AutoProxSGD` count as one sweep
        total = len(PROBLEMS) * (sweeps(seeds) * ITERATIONS + auto_runs * share)
        for name, problem in PROBLEMS.items():
            key = f"{self.name}-{name}"
            if store.record(key) is None:
                results = run(seeds, ITERATIONS, problem, lambda: progress(1, total), options.first_seed)
                auto = run_auto(AUTO_SEEDS, ITERATIONS, problem, lambda: progress(share, total), options.first_seed)
                store.finish(key, results.joined(auto).to_record())
            else:
                progress(total // len(PROBLEMS), total)

    def missing(self, store: Store) -> list[str]:
        return [key for problem in PROBLEMS if store.record(key := f"{self.name}-{problem}") is None]

    def merged(self, stores: list[Store], settings: dict[str, Any]) -> dict[str, Any]:
        records = {}
        for name in (f"{self.name}-{problem}" for problem in PROBLEMS):
            found = {other.folder: record for other in stores if (record := other.record(name, _checked)) is not None}
            if not found:
                raise StoreError(f"{name} is in no folder")
            (first, records[name]), *others = found.items()
            for folder, record in others:
                if record != records[name]:
                    raise StoreError(
                        f"{name} differs between {first} and {folder}, and its means cannot be merged: leave one of "
                        "them out"
                    )
        return records

    def results(self, store: Store) -> tuple[Section, dict[str, Any]] | None:
        paper, shifted = (store.record(f"{self.name}-{name}", Results.from_record) for name in PROBLEMS)
        if paper is None or shifted is None:
            return None
        from proxmo.experiments.synthetic_report import section  # imports matplotlib

        numbers = {**paper.to_json(), "shifted": shifted.to_json()}
        return section(paper, shifted, store.settings(self.name) or {}), numbers


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    Results.from_record(record)
    return record
