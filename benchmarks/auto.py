"""Compare AutoProxSGD with the best cell of a grid of ProxSGD on small problems: `python -m benchmarks.auto`.

Problems: quadratics, non-convex robust regressions, and penalised regressions on real data (`regressions`). Error: mean
over the last tenth of the steps of ‖∇F‖² (for robust regressions, of the squared prox-gradient mapping), or of the gap
F − F* on real data. Grid: M in L·{10⁻¹, 1, …, 10⁴}, γ in {10⁻¹, …, 10⁻⁵}; the best cell is chosen in hindsight by this
same error. With `--ablation`, AutoProxSGD also runs with each of its parts removed or changed. Every run writes a
record to the folder of results. Records that are there are not run again, so that the benchmark can be stopped and
resumed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from unittest import mock

import torch
from matplotlib.figure import Figure
from torch.nn import Parameter

from benchmarks.output import BLUE, GREY, ORANGE, write
from benchmarks.records import perform_missing, read
from benchmarks.regressions import regressions
from proxmo import AutoProxSGD
from proxmo.experiments.problems import Problem, Quadratic, RobustRegression
from proxmo.experiments.threads import one_thread
from proxmo.optim import auto

STRIDE = 20  # steps between two measurements of the error
AUTO = "AutoProxSGD"
# The constants of `proxmo.optim.auto` that each variant changes.
VARIANTS: dict[str, dict[str, float]] = {
    AUTO: {},
    "lr is never halved": {"STALL": -math.inf},
    "no average": {"AVERAGING": 0.0},
    "γ = k^(-1/2)": {"AVERAGING": 0.5},
    "first move 1e-4": {"FIRST_MOVE": 1e-4},
    "first move 1e-1": {"FIRST_MOVE": 1e-1},
}


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


@dataclass(frozen=True)
class Run:
    """A method on a problem."""

    problem: str
    method: str
    steps: int
    seeds: int

    def __str__(self) -> str:
        return f"{self.problem}, {self.method}"

    def path(self, out: Path) -> Path:
        name = "".join(c if c.isalnum() else "-" for c in f"{self.problem} {self.method} {self.steps} {self.seeds}")
        return out / "records" / f"{name}.json"


@dataclass(frozen=True)
class Record(Run):
    """A run with its error, the mean over the seeds, and the cell of the grid that it is from."""

    error: float
    cell: str

    def summary(self) -> str:
        return f"error {self.error:.3g} {self.cell}"


def is_measured(k: int, steps: int) -> bool:
    """Whether the error is measured after step ``k``: in the last tenth, and always after the last step."""
    return k >= 0.9 * steps and (steps - 1 - k) % STRIDE == 0


def grid_error(problem: Problem, steps: int, seeds: int) -> tuple[float, float, float]:
    """Return the error, M and γ of the best cell of ProxSGD, whose formulas are written out for all cells at once."""
    Ms, gammas = [problem.smoothness * 10.0**i for i in range(-1, 5)], [10.0**-j for j in range(1, 6)]
    start = problem.start(seeds)
    x = start.expand(len(Ms), len(gammas), *start.shape).flatten(0, 2).clone()
    weights = torch.tensor(gammas, dtype=x.dtype).repeat(len(Ms)).repeat_interleave(seeds)
    weights = weights.reshape(-1, *[1] * (x.dim() - 1))
    average = torch.zeros_like(x)
    generator = torch.Generator().manual_seed(1)
    errors, count = torch.zeros(len(Ms) * len(gammas), dtype=torch.float64), 0
    for k in range(steps):
        sample = problem.sample(seeds, generator)
        gradient = problem.gradient(x, sample.repeat(len(Ms) * len(gammas), *[1] * (sample.dim() - 1)))
        average = gradient if k == 0 else torch.lerp(average, gradient, weights)
        for M, part, direction in zip(Ms, x.chunk(len(Ms)), average.chunk(len(Ms)), strict=True):
            part.sub_(direction, alpha=1 / M)
            if problem.penalty is not None:
                problem.penalty.prox(part, 1 / M, out=part)
        if is_measured(k, steps):
            errors += problem.error(x).reshape(-1, seeds).mean(1)
            count += 1
    best = int(errors.nan_to_num(nan=math.inf).argmin())
    return float(errors[best]) / count, Ms[best // len(gammas)], gammas[best % len(gammas)]


def auto_error(problem: Problem, steps: int, seed: int) -> float:
    """Return the error of one run."""
    x = Parameter(problem.start(1))
    optimizer = AutoProxSGD([x], penalty=problem.penalty)
    generator = torch.Generator().manual_seed(100 + seed)
    errors = []
    for k in range(steps):
        x.grad = problem.gradient(x.detach(), problem.sample(1, generator))
        optimizer.step()
        if is_measured(k, steps):
            errors.append(float(problem.error(x.detach())))
    return fmean(errors)


def perform(run: Run, found: dict[str, Problem]) -> Record:
    problem = found[run.problem]
    if run.method == "grid":
        error, M, gamma = grid_error(problem, run.steps, run.seeds)
        return Record(**asdict(run), error=error, cell=f"{M / problem.smoothness:g}·L, {gamma:g}")
    with mock.patch.dict(vars(auto), VARIANTS[run.method]):
        return Record(**asdict(run), error=fmean(auto_error(problem, run.steps, s) for s in range(run.seeds)), cell="")


def draw(ratios: dict[str, dict[str, float]]) -> Figure:
    """Plot the ratio of each problem, with those of the other variants, if there are any, in grey."""
    figure = Figure(figsize=(8, 0.28 * len(ratios) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, of_problem in enumerate(ratios.values()):
        others = [ratio for method, ratio in of_problem.items() if method != AUTO]
        axes.plot(others, [place] * len(others), "|", color=GREY)
        axes.plot(of_problem[AUTO], place, "o", color=ORANGE)
    axes.axvline(1, color=BLUE, linewidth=1)
    axes.set_yticks(range(len(ratios)), list(ratios))
    axes.invert_yaxis()
    has_variants = any(len(of_problem) > 1 for of_problem in ratios.values())
    note = " (grey: parts removed or changed)" if has_variants else ""
    axes.set(xscale="log", xlabel=f"error of AutoProxSGD / error of the best of 30 cells{note}")
    axes.set_xticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    return figure


def rows(ratios: dict[str, dict[str, float]], records: dict[tuple[str, str], Record]) -> list[tuple[str, ...]]:
    """Return a row for each problem."""
    return [
        (
            problem,
            f"{records[problem, 'grid'].error:.3g}",
            records[problem, "grid"].cell,
            f"{records[problem, AUTO].error:.3g}",
            f"{of_problem[AUTO]:.2f}",
        )
        for problem, of_problem in ratios.items()
    ]


def ablation_rows(ratios: dict[str, dict[str, float]], classical: set[str]) -> list[tuple[str, ...]]:
    """Return a row for each variant: geometric means and the worst problem, of the classical ones and of the others."""
    found = []
    for method in dict.fromkeys(method for of_problem in ratios.values() for method in of_problem):
        row = [method]
        for kind in (True, False):
            parts = {name: found[method] for name, found in ratios.items() if (name in classical) == kind}
            if parts:
                worst = max(parts, key=parts.__getitem__)
                mean = math.exp(fmean(map(math.log, parts.values())))
                row += [f"{mean:.2f}", f"{parts[worst]:.2f} ({worst})"]
            else:
                row += ["", ""]
        found.append(tuple(row))
    return found


@one_thread()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--libsvm", type=Path, nargs="*", default=[], help="files with two classes, such as a9a")
    parser.add_argument("--ablation", action="store_true", help="also run without each part of the rule")
    parser.add_argument("--out", type=Path, default=Path("results/auto"))
    options = parser.parse_args(arguments)
    classical = problems()
    found = {problem.name: problem for problem in [*classical, *regressions(options.libsvm)]}
    methods = ["grid", *(VARIANTS if options.ablation else [AUTO])]
    runs = [Run(problem, method, options.samples, options.seeds) for method in methods for problem in found]
    perform_missing(runs, options.out, partial(perform, found=found))
    records = {(run.problem, run.method): read(run.path(options.out), Record) for run in runs}
    ratios = {
        problem: {method: records[problem, method].error / records[problem, "grid"].error for method in methods[1:]}
        for problem in found
    }
    numbers = [asdict(record) for record in records.values()]
    columns = ("problem", "best of 30 cells", "its M, γ", AUTO, "ratio")
    write(options.out, "auto", numbers, draw(ratios), columns, rows(ratios, records))
    columns = ("rule", "classical: geometric mean", "worst", "real data: geometric mean", "worst")
    table = ablation_rows(ratios, {problem.name for problem in classical})
    write(options.out, "ablation", ratios, draw(ratios), columns, table)


if __name__ == "__main__":
    main()
