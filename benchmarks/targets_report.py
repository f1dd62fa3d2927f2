"""The table and the figure of `benchmarks.targets`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

HALF_A_POINT = 0.005


class Look(NamedTuple):
    """How a method is named and drawn."""

    label: str
    colour: str
    marker: str = ""


Looks: TypeAlias = dict[str, Look]  # of all methods of a report, by name and in order
LOOKS: Looks = {
    "dense": Look("dense", "black"),
    "trimmed": Look("trimmed", "#D55E00", "o"),
    "gradual": Look("gradual pruning", "#0072B2", "s"),
    "one-shot": Look("one-shot pruning", "#009E73", "v"),
    "searched": Look("ℓ1 or ℓ2,1, searched", "#CC79A7", "D"),
    "pat": Look("torchao PAT", "#E69F00", "^"),
    "scratch": Look("from scratch", "#999999", "X"),
}


@dataclass(frozen=True)
class Record:
    """One run: what was asked for and what came out."""

    task: str
    kind: str
    target: float
    method: str
    seed: int
    metric: str
    score: float
    removed: float
    widths: list[int] | None
    runs: int
    strength: float | None
    seconds: float

    def summary(self) -> str:
        return f"{self.metric} {self.score:.4f}, removed {self.removed:.2%}, {self.seconds:.1f} s"


@dataclass(frozen=True)
class Cell:
    """The runs of one setting with all seeds."""

    records: list[Record]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def score(self) -> float:
        return statistics.mean(record.score for record in self.records)

    @property
    def spread(self) -> float:
        return statistics.stdev(record.score for record in self.records) if len(self.records) > 1 else 0.0

    @property
    def removed(self) -> float:
        return statistics.mean(record.removed for record in self.records)

    def __str__(self) -> str:
        """Return mean ± standard deviation, and in brackets a share that misses the target and runs of a search."""
        first = self.first
        digits, factor = (2, 100) if first.metric == "accuracy" else (3, 1)
        text = f"{factor * self.score:.{digits}f}"
        if len(self.records) > 1:
            text += f" ± {factor * self.spread:.{digits}f}"
        notes = []
        if first.method != "dense" and abs(self.removed - first.target) > HALF_A_POINT:
            notes.append(f"{self.removed:.1%} removed")
        if first.method == "searched":
            notes.append(f"{sum(record.runs for record in self.records)} trials")
        return f"{text} ({', '.join(notes)})" if notes else text


def cells(records: list[Record], looks: Looks) -> list[Cell]:
    """Put the seeds of each setting together, in the order of tasks, kinds, targets and methods."""
    found: dict[tuple[str, str, float, str], list[Record]] = {}
    tasks, methods = list(dict.fromkeys(record.task for record in records)), list(looks)

    def place(record: Record) -> tuple[int, str, float, int, int]:
        return tasks.index(record.task), record.kind, record.target, methods.index(record.method), record.seed

    for record in sorted(records, key=place):
        found.setdefault((record.task, record.kind, record.target, record.method), []).append(record)
    return [Cell(group) for group in found.values()]


def columns(looks: Looks) -> tuple[str, ...]:
    return ("task", "blocks", "removed", "seeds", *(look.label for look in looks.values()))


def rows(records: list[Record], looks: Looks) -> list[tuple[str, ...]]:
    """Return a line for each task, kind and target, with the score of every method."""
    found = {(c.first.task, c.first.kind, c.first.target, c.first.method): c for c in cells(records, looks)}
    settings = dict.fromkeys(key[:3] for key in found if key[3] != "dense")
    lines = []
    for task, kind, target in settings:
        keys = [(task, *(("elements", 0.0) if name == "dense" else (kind, target)), name) for name in looks]
        scores = [str(found[key]) if key in found else "" for key in keys]
        counts = sorted({len(found[key].records) for key in keys if key in found})
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        lines.append((task, kind, f"{target:.0%}", seeds, *scores))
    return lines


def draw(records: list[Record], looks: Looks) -> Figure:
    """Plot the score against the share removed, a row of panels for each task."""
    drawn = cells(records, looks)
    tasks = list(dict.fromkeys(cell.first.task for cell in drawn))
    kinds = sorted({cell.first.kind for cell in drawn if cell.first.method != "dense"}) or ["elements"]
    figure = Figure(figsize=(6 * len(kinds), 3.8 * len(tasks) + 0.6), layout="constrained")
    panels = figure.subplots(len(tasks), len(kinds), squeeze=False)
    for task, line in zip(tasks, panels, strict=True):
        for kind, axes in zip(kinds, line, strict=True):
            mine = [cell for cell in drawn if cell.first.task == task]
            shown = [c for c in mine if c.first.kind == kind or c.first.method == "dense"]
            if all(cell.first.method == "dense" for cell in shown) and len(kinds) > 1:
                axes.set_axis_off()
                continue
            _panel(axes, shown, looks)
            axes.set_title(f"{task}, {kind}")
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _panel(axes: Any, mine: list[Cell], looks: Looks) -> None:
    percent = 100 if mine[0].first.metric == "accuracy" else 1
    targets = sorted({cell.first.target for cell in mine if cell.first.method != "dense"})
    for position, (method, look) in enumerate(looks.items()):
        chosen = [cell for cell in mine if cell.first.method == method]
        scores = [percent * cell.score for cell in chosen]
        if not chosen:
            continue
        if method == "dense":
            axes.axhline(scores[0], color=look.colour, linestyle="--", linewidth=1, label=look.label)
            continue
        # so that error bars do not hide one another
        apart = 1 + 0.14 * ((len(looks) - 1) / 2 - position) / len(looks)
        axes.errorbar(
            [apart * max(1 - cell.removed, 1e-4) for cell in chosen],
            scores,
            [percent * cell.spread for cell in chosen],
            marker=look.marker,
            markersize=5,
            capsize=2,
            linewidth=2 if method == "trimmed" else 1,
            elinewidth=0.8,
            color=look.colour,
            label=look.label,
            zorder=3 if method == "trimmed" else 2,
        )
    _cut(axes, mine, percent)
    axes.set(xscale="log", xlabel="removed", ylabel="test accuracy (%)" if percent == 100 else "validation loss")
    axes.invert_xaxis()  # the axis is the share that is left
    axes.xaxis.set_major_locator(FixedLocator([1 - target for target in targets]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda kept, _: f"{1 - kept:.0%}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _cut(axes: Any, mine: list[Cell], percent: int) -> None:
    """Cut off scores far below those of the trimmed penalty, which would hide all differences between the others."""
    dense = [cell.score for cell in mine if cell.first.method == "dense"]
    trimmed = [cell.score for cell in mine if cell.first.method == "trimmed"]
    if not dense or not trimmed:
        return
    worst = percent * max(abs(score - dense[0]) for score in trimmed)
    far = 2.5 * max(worst, 0.01 * percent)
    if percent == 100:
        axes.set_ylim(max(axes.get_ylim()[0], percent * dense[0] - far), min(axes.get_ylim()[1], 100))
    else:
        axes.set_ylim(top=min(axes.get_ylim()[1], dense[0] + far))
