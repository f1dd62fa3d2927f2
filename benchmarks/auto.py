"""Compare AutoProxSGD with the best cell of a 25-point grid of ProxSGD: `python -m benchmarks.auto`.

Error: mean of ‖∇F‖² (for ℓ1 and ℓ∞,1, of the squared prox-gradient mapping) over the last tenth of the gradient
samples. Grid: M in L·{1, 10, …, 10⁴}, γ in {10⁻¹, …, 10⁻⁵}; the best cell is chosen in hindsight by this same error.
"""

from __future__ import annotations

import argparse
import math

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn import Parameter

from proxmo import AutoProxSGD, ProxSGD
from proxmo.experiments.problems import Problem, Quadratic, RobustRegression
from proxmo.experiments.threads import one_thread

STRIDE = 10  # steps between two measurements of the error


def problems() -> list[Problem]:
    """Return the paper's quadratic at three noise levels, harder quadratics, and non-convex regressions."""
    steep = [10 ** (-i / 3) for i in range(10)]
    return [
        *(Quadratic(f"paper, σ = {s:g}", [1.0] * 5, 0.0, 1e4, s) for s in (5.0, 25.0, 125.0)),
        *(Quadratic(f"shifted, a = 10⁴, σ = {s:g}", [1.0] * 5, 10.0, 1e4, s) for s in (5.0, 125.0)),
        *(Quadratic(f"shifted, a = {a:g}, σ = 5", [1.0] * 5, 10.0, a, 5.0) for a in (0.0, 1.0, 100.0)),
        *(Quadratic(f"ill-conditioned, a = {a:g}, σ = 5", steep, 3.0, a, 5.0) for a in (0.0, 1.0, 100.0)),
        *(RobustRegression(f"robust, {kind}, batch {b}", kind, b) for kind in ("l1", "linf1") for b in (1, 8)),
    ]


def grid_error(problem: Problem, samples: int, seeds: int) -> tuple[float, float, float]:
    """Return the error, M and γ of the best cell."""
    cells = [(problem.smoothness * 10.0**i, 10.0**-j) for i in range(5) for j in range(1, 6)]
    start = problem.start(seeds)
    points = torch.stack([start] * len(cells))
    params = [Parameter(x) for x in points]
    groups = [{"params": [p], "lr": 1 / M, "momentum": 1 - g} for p, (M, g) in zip(params, cells, strict=True)]
    optimizer = ProxSGD(groups, penalty=problem.penalty)
    generator = torch.Generator().manual_seed(1)
    errors, count = torch.zeros(len(cells), dtype=torch.float64), 0
    for k in range(samples):
        sample = problem.sample(seeds, generator)
        repeated = sample.repeat(len(cells), *[1] * (sample.dim() - 1))
        gradients = problem.gradient(points.flatten(0, 1), repeated).reshape(points.shape)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        if k >= 0.9 * samples and k % STRIDE == 0:
            errors += problem.error(points.flatten(0, 1)).reshape(len(cells), seeds).mean(1)
            count += 1
    best = int(errors.argmin())
    return float(errors[best]) / count, *cells[best]


def auto_error(problem: Problem, samples: int, seed: int) -> float:
    """Return the error of one run."""
    x = Parameter(problem.start(1))
    optimizer = AutoProxSGD([x], penalty=problem.penalty)
    generator = torch.Generator().manual_seed(100 + seed)
    errors = []
    for k in range(samples):
        x.grad = problem.gradient(x.detach(), problem.sample(1, generator))
        optimizer.step()
        if k >= 0.9 * samples and k % STRIDE == 0:
            errors.append(float(problem.error(x.detach())))
    return sum(errors) / len(errors)


@one_thread()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    table = Table("problem", "grid", "M", "γ", "auto", "ratio")
    ratios = []
    with Progress() as progress:
        for problem in progress.track(problems(), description="problems"):
            best, M, gamma = grid_error(problem, options.samples, options.seeds)
            runs = [auto_error(problem, options.samples, seed) for seed in range(options.seeds)]
            mean = sum(runs) / len(runs)
            ratios.append(mean / best)
            table.add_row(
                problem.name,
                f"{best:.3g}",
                f"{M:.3g}",
                f"{gamma:g}",
                f"{mean:.3g}",
                f"{ratios[-1]:.2f}",
            )
    geometric = math.exp(sum(map(math.log, ratios)) / len(ratios))
    Console().print(table, f"ratio: geometric mean {geometric:.2f}, worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
