"""Compare methods on non-convex composite problems at equal numbers of gradients: `python -m benchmarks.methods`.

Each method is tuned over 42 settings with 5 seeds, by the geometric mean over seeds of the mean error in the last tenth
of the budget; its best setting then runs with other seeds. The error is ‖G‖² of the full objective, where G is the
prox-gradient mapping with step size 1. The gradient of one sample at one point costs 1, so two-point methods pay twice.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.progress import Progress
from torch.nn import Parameter

from benchmarks.datasets import Dataset, embedded, from_file
from benchmarks.objectives import (
    NonconvexLogistic,
    Objective,
    RobustRows,
    TwoLayers,
    full_gradients,
    gradients,
    mapping_norms,
)
from benchmarks.output import write
from benchmarks.solvers import SOLVERS, Setting, Solver, edges
from proxmo.experiments.threads import one_thread

TUNING_SEEDS = range(1000, 1005)
POINTS = 40  # measurements per curve
COLOURS = {
    "vanilla": "#0072B2",
    "momentum": "#D55E00",
    "STORM": "#009E73",
    "hybrid SGD": "#CC79A7",
    "SpiderBoost": "#000000",
}


class Oracle:
    """Closures that set the gradients of all settings and seeds; samples are drawn per seed."""

    def __init__(
        self, objective: Objective, data: Dataset, points: list[torch.Tensor], params: list[list[Parameter]], seed: int
    ) -> None:
        self.evaluated = 0
        self._objective, self._data, self._points, self._params = objective, data, points, params
        self._generator = torch.Generator().manual_seed(seed)

    def sample(self, size: int) -> Callable[[], None]:
        rows = torch.randint(self._data.size, (self._points[0].shape[1], size), generator=self._generator)

        def closure() -> None:
            self.evaluated += size
            self._set(gradients(self._objective, self._points, self._data.inputs[rows], self._data.classes[rows]))

        return closure

    def everything(self) -> Callable[[], None]:
        def closure() -> None:
            self.evaluated += self._data.size
            self._set(full_gradients(self._objective, self._points, self._data))

        return closure

    def _set(self, found: list[torch.Tensor]) -> None:
        for setting, params in enumerate(self._params):
            for param, gradient in zip(params, found, strict=True):
                param.grad = gradient[setting]


def run(
    solver: Solver, settings: list[Setting], objective: Objective, data: Dataset, seeds: range, checkpoints: list[int]
) -> NDArray[np.float64]:
    """Run settings with equal batch and period together; return errors of shape (settings, seeds, checkpoints)."""
    points = [x.repeat(len(settings), *[1] * x.dim()) for x in objective.start(data, seeds)]
    params = [[Parameter(point[i]) for point in points] for i in range(len(settings))]  # views of the points
    groups = [
        {"params": ps, **{name: getattr(setting, name) for name in solver.options}}
        for ps, setting in zip(params, settings, strict=True)
    ]
    optimizer = solver.optimizer(groups, objective.penalty)
    oracle = Oracle(objective, data, points, params, seeds[0])
    errors: list[NDArray[np.float64]] = []
    for checkpoint in checkpoints:
        while oracle.evaluated + solver.cost(optimizer, settings[0].batch, data.size) <= checkpoint:
            solver.step(optimizer, settings[0].batch, oracle)
        errors.append(mapping_norms(objective, points, data).numpy())
    return np.stack(errors, axis=-1)


def tune(solver: Solver, objective: Objective, data: Dataset, budget: int) -> Setting:
    """Return the setting with the smallest error at the end of the budget."""
    last_tenth = [int(budget * share) for share in np.linspace(0.9, 1, 5)]
    by_batch: dict[tuple[int, int], list[Setting]] = defaultdict(list)
    for setting in solver.grid(data.size):
        by_batch[setting.batch, setting.period].append(setting)
    found: dict[Setting, float] = {}
    for settings in by_batch.values():
        errors = run(solver, settings, objective, data, TUNING_SEEDS, last_tenth)
        found.update(zip(settings, np.log(errors.mean(-1)).mean(1).tolist(), strict=True))
    return min(found, key=found.__getitem__)


@dataclass(frozen=True)
class Result:
    """A tuned method on a problem: quantiles over seeds at each number of gradients."""

    problem: str
    method: str
    setting: Setting
    edges: list[str]
    gradients: list[int]
    low: list[float]
    median: list[float]
    high: list[float]


def compare(objective: Objective, data: Dataset, solver: Solver, passes: int, seeds: int) -> Result:
    budget = passes * data.size
    setting = tune(solver, objective, data, budget)
    checkpoints = [int(budget * k / POINTS) for k in range(POINTS + 1)]
    errors = run(solver, [setting], objective, data, range(seeds), checkpoints)[0]
    # "nearest", since interpolation with the inf of a diverged run gives NaN
    low, median, high = (np.quantile(errors, q, axis=0, method="nearest").tolist() for q in (0.1, 0.5, 0.9))
    at_edge = edges(setting, solver.grid(data.size))
    return Result(f"{objective.name}, {data.name}", solver.name, setting, at_edge, checkpoints, low, median, high)


def draw(results: list[Result], passes: int, seeds: int) -> Figure:
    """Plot a panel per problem and a line per method."""
    problems = list(dict.fromkeys(result.problem for result in results))
    columns = min(3, len(problems))
    rows = -(-len(problems) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(problems) :]:
        axes.set_axis_off()
    for axes, problem in zip(panels, problems, strict=False):
        for result in (r for r in results if r.problem == problem):
            colour = COLOURS[result.method]
            axes.plot(result.gradients, result.median, color=colour, label=result.method, linewidth=1.8)
            axes.fill_between(result.gradients, result.low, result.high, color=colour, alpha=0.15, linewidth=0)
        axes.set(yscale="log", title=problem, xlabel="gradients evaluated", ylabel="‖G‖²")
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 3))
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"Tuned methods, {passes} passes over the data: median and 10% to 90% quantiles of {seeds} seeds")
    return figure


COLUMNS = ("problem", "method", "setting", "final ‖G‖²", "10% to 90%", "/ momentum's", "/ momentum's at 20%")


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """Format final errors, and multiples of momentum's error at the end and after 20% of the budget."""
    momentum = {result.problem: result for result in results if result.method == "momentum"}
    early = POINTS // 5
    return [
        (
            result.problem,
            result.method,
            describe(result),
            f"{result.median[-1]:.2e}",
            f"{result.low[-1]:.1e} to {result.high[-1]:.1e}",
            f"{result.median[-1] / momentum[result.problem].median[-1]:.2g}",
            f"{result.median[early] / momentum[result.problem].median[early]:.2g}",
        )
        for result in results
    ]


def describe(result: Result) -> str:
    """Format the tuned values; a star marks the first or last value of the grid."""
    omitted = {"lr": 0.0, "batch": 0, "momentum": 0.0, "averaging": 1.0}  # values that are not shown
    values = {name: getattr(result.setting, name) for name in omitted}
    return ", ".join(
        f"{name} {value:g}{'*' if name in result.edges else ''}"
        for name, value in values.items()
        if value != omitted[name]
    )


@one_thread()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="LIBSVM files, used instead of embedded data")
    parser.add_argument("--passes", type=int, default=30, help="gradient budget, in passes over the data")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/methods"))
    options = parser.parse_args(arguments)
    if options.data:
        files = [from_file(path) for path in options.data]
        problems = [
            (objective, data) for data in files for objective in (NonconvexLogistic(), RobustRows(), TwoLayers())
        ]
    else:
        cancer, digits = embedded("breast-cancer"), embedded("digits")
        problems = [(NonconvexLogistic(), cancer), (RobustRows(), digits), (TwoLayers(), digits)]
    jobs = [(objective, data, solver) for objective, data in problems for solver in SOLVERS]
    with Progress() as progress:
        results = [
            compare(*job, options.passes, options.seeds)
            for job in progress.track(jobs, description="methods × problems")
        ]
    figure = draw(results, options.passes, options.seeds)
    write(options.out, "methods", [asdict(result) for result in results], figure, COLUMNS, rows(results))


if __name__ == "__main__":
    main()
