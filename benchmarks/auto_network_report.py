"""The runs of `benchmarks.auto_network`, their records, and the table and the figure made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.auto_methods import LRS, MOMENTA, OWN, PEERS, cell

COLUMNS = ("task", "method", "seeds", "F", "F / best constant", "F / best annealed", "test", "zeros")
COLOURS = dict(
    zip(
        [*OWN, *PEERS],
        ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#882255"),
        strict=True,
    )
)
GREYS = ("#BBBBBB", "#777777", "#222222")  # for momenta of the grid


@dataclass(frozen=True)
class Run:
    """One method on one task with one seed."""

    task: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.method}, seed {self.seed}"

    def path(self, out: Path) -> Path:
        name = f"{self.task}-{self.method}-{self.seed}".replace(", ", "-").replace(" ", "-")
        return out / "records" / f"{name}.json"


@dataclass(frozen=True)
class Record(Run):
    """A run with what came out; NaN if it diverged."""

    metric: str
    value: float
    """F = loss + ψ over the last tenth of the steps."""
    score: float
    zeros: float
    seconds: float

    def summary(self) -> str:
        return f"F {self.value:.4f}, {self.metric} {self.score:.4f}, zeros {self.zeros:.1%}, {self.seconds:.1f} s"


def best_cell(records: list[Record], schedule: str) -> str | None:
    """Return the cell of the grid with the smallest F for the first seed, if one did not diverge."""
    cells = [r for r in records if r.method.startswith(schedule) and r.seed == 0 and math.isfinite(r.value)]
    return min(cells, key=lambda record: record.value).method if cells else None


def rows(records: list[Record]) -> list[tuple[str, ...]]:
    """Return a row for each task and method that is not a worse cell of the grid, and one for all tasks together."""
    ratios: dict[str, list[float]] = {}
    found = []
    for task in dict.fromkeys(record.task for record in records):
        of_task = [record for record in records if record.task == task]
        best = {schedule: best_cell(of_task, schedule) for schedule in MOMENTA}
        names = [name for name in (*best.values(), *COLOURS) if any(r.method == name for r in of_task)]
        values = {name: fmean(r.value for r in of_task if r.method == name) for name in names}
        for name in names:
            runs = [record for record in of_task if record.method == name]
            compared = [values[name] / values[cell] if cell else math.nan for cell in best.values()]
            if name in COLOURS:
                ratios.setdefault(name, []).append(compared[0])
            found.append((task, name, str(len(runs)), *_numbers(runs, compared)))
    for name, of_method in ratios.items():
        mean = math.exp(fmean(map(math.log, of_method)))
        found.append(("geometric mean", name, "", "", _ratio(mean), "", "", ""))
    return found


def _numbers(runs: list[Record], ratios: list[float]) -> Iterator[str]:
    value = fmean(run.value for run in runs)
    yield f"{value:.4f}" if math.isfinite(value) else "diverged"
    yield from map(_ratio, ratios)
    score, zeros = fmean(run.score for run in runs), fmean(run.zeros for run in runs)
    yield f"{score:.1%}" if runs[0].metric == "accuracy" else f"loss {score:.3f}"
    yield f"{zeros:.0%}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "–"


def draw(records: list[Record]) -> Figure:
    """Plot F over lr for the cells of the grid, with a horizontal line for each method that needs no lr."""
    tasks = list(dict.fromkeys(record.task for record in records))
    figure = Figure(figsize=(4.2 * min(3, len(tasks)), 3.4 * -(-len(tasks) // 3) + 0.9), layout="constrained")
    panels = figure.subplots(-(-len(tasks) // 3), min(3, len(tasks)), squeeze=False).flatten()
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    for axes, task in zip(panels, tasks, strict=False):
        of_task = [record for record in records if record.task == task]
        for schedule, momenta in MOMENTA.items():
            for momentum, grey in zip(momenta, GREYS, strict=False):
                values = [_mean(of_task, cell(schedule, lr, momentum)) for lr in LRS]
                style = "--" if schedule == "cosine" else "-"
                axes.plot(
                    LRS, values, style, color=grey, marker=".", label=f"ProxSGD, {schedule}, momentum {momentum:g}"
                )
        for name, colour in COLOURS.items():
            if math.isfinite(value := _mean(of_task, name)):
                axes.axhline(value, color=colour, label=name, linewidth=2.5 if name in OWN else 1.2)
        least = min(record.value for record in of_task if math.isfinite(record.value))
        axes.set(xscale="log", title=task, xlabel="lr of ProxSGD", ylabel="F over the last tenth")
        axes.set_ylim(0.95 * least, 2 * least)  # cells that are far behind or diverge are outside
        axes.grid(alpha=0.3)
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _mean(records: list[Record], method: str) -> float:
    values = [record.value for record in records if record.method == method]
    return fmean(values) if values else math.nan
