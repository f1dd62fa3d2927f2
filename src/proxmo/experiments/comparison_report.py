"""The section of a training experiment in the report: claims, a figure and a table."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from proxmo.experiments.comparison import OBJECTIVE, PENALTY, TEST_ACCURACY, TRAIN_LOSS, Comparison, Measure
from proxmo.experiments.figures import FAINT, METHOD_COLOURS, in_ink, panels, to_svg, with_legend
from proxmo.experiments.report import Claim, NumberTable, Picture, Section
from proxmo.experiments.training import Record, Setting

WIDE = 3  # how many times its smallest value the largest one must be for a log axis, which would have few numbers
SMOOTH_FROM = 8  # epochs; the second half of a shorter run is too short to judge smoothness


def section(comparison: Comparison, data: str, settings: dict[str, Any], missing: int) -> Section:
    """Return the section of a training experiment; ``missing`` is how many runs it does not have yet."""
    experiment = comparison.experiment
    setting = comparison.records[0].setting
    pictures = [
        Picture(
            to_svg(draw(comparison), experiment.name),
            f"Mean and standard deviation over seeds at batch size {comparison.batches[0]}. Each method is tuned by "
            "training loss over the settings in the table below.",
        )
    ]
    if len(comparison.batches) > 1:
        pictures.append(
            Picture(
                to_svg(draw_batches(comparison), f"{experiment.name}-batches"),
                "After the last epoch, by batch size: mean and standard deviation over seeds. Each method is "
                "tuned at each size.",
            )
        )
    return Section(
        experiment.name,
        experiment.title,
        f"ResNet-18 of base width {setting.width} on {data}, {setting.epochs} epochs. {experiment.text}"
        + (f" Missing runs with further seeds: {missing}." if missing else ""),
        pictures,
        claims(comparison),
        [_table(comparison)],
        settings,
    )


class Pair(NamedTuple):
    """A setting of each method, to compare."""

    where: str
    """How the settings were chosen."""
    momentum: Setting
    vanilla: Setting


def claims(comparison: Comparison) -> list[Claim]:
    """Compare with the paper: momentum is ahead at the paper's setting and when tuned, and which lr is best."""
    largest, *smaller = comparison.batches
    pairs = [*_at_paper_lr(comparison, largest), Pair("each tuned", **_tuned(comparison, largest))]
    found = []
    for pair in pairs:
        found += [
            _ahead(comparison, TRAIN_LOSS, pair, less_is_better=True),
            _ahead(comparison, TEST_ACCURACY, pair, less_is_better=False),
        ]
    if pairs[0].vanilla.epochs >= SMOOTH_FROM:
        found.append(_smoother(comparison, pairs[0]))
    for batch in smaller:
        found += [_ahead(comparison, TRAIN_LOSS, pair, less_is_better=True) for pair in _at_paper_lr(comparison, batch)]
    if smaller:
        found += [_best_setting(comparison, batch) for batch in comparison.batches if _of_paper(comparison, batch)]
        found += [_costs_less(comparison, batch) for batch in smaller]
    return found


def _at_paper_lr(comparison: Comparison, batch: int) -> list[Pair]:
    """Return the pair with the lr and the momentum of the paper, if it ran."""
    lr = comparison.experiment.paper_lr
    settings = {r.setting.momentum: r.setting for r in comparison.matching(batch=batch, lr=lr, annealed=False)}
    if 0.0 not in settings or 0.9 not in settings:
        return []
    where = f"lr = {lr:g}, momentum 0.9" + (f", batch {batch}" if batch != comparison.batches[0] else "")
    return [Pair(where, settings[0.9], settings[0.0])]


def _ahead(comparison: Comparison, measure: Measure, pair: Pair, *, less_is_better: bool) -> Claim:
    ours, theirs = (comparison.summary(setting, measure.field) for setting in (pair.momentum, pair.vanilla))
    measured = " against ".join("diverged" if found is None else found.text(measure.form) for found in (ours, theirs))
    if ours is None or theirs is None:
        better = ours is not None
    else:
        better = ours.mean < theirs.mean if less_is_better else ours.mean > theirs.mean
    return Claim(f"{measure.column}: momentum is ahead ({pair.where})", "yes", measured, better)


def _smoother(comparison: Comparison, pair: Pair) -> Claim:
    ours, theirs = (
        None if any(run.diverged for run in runs) else mean(map(roughness, runs))
        for runs in map(comparison.seeds, (pair.momentum, pair.vanilla))
    )
    return Claim(
        f"test accuracy: momentum is smoother ({pair.where}; back-and-forth per epoch in the second half)",
        "yes",
        " against ".join("diverged" if found is None else f"{found:.2%}" for found in (ours, theirs)),
        ours is not None and (theirs is None or ours < theirs),
    )


def roughness(record: Record) -> float:
    """Return the back-and-forth of test accuracy per epoch in the second half of a run: 0 if it only rises."""
    accuracies = [epoch.test_accuracy for epoch in record.epochs[len(record.epochs) // 2 :]]
    path = sum(abs(b - a) for a, b in pairwise(accuracies))
    return (path - abs(accuracies[-1] - accuracies[0])) / (len(accuracies) - 1)


def _of_paper(comparison: Comparison, batch: int) -> int | None:
    """Return the batch size of the paper that this one stands for, if the paper says which lr was best there."""
    experiment = comparison.experiment
    theirs = experiment.stands_for.get(batch, batch)
    return theirs if theirs in experiment.paper_best_lr else None


def _best_setting(comparison: Comparison, batch: int) -> Claim:
    best, theirs = comparison.tuned(batch, vanilla=False), _of_paper(comparison, batch)
    assert theirs is not None
    paper = f"lr {comparison.experiment.paper_best_lr[theirs]:g}, momentum 0.9"
    measured = f"lr {best.lr:g}, momentum {best.momentum:g}"
    instead = "" if theirs == batch else f" (in place of {theirs})"
    statement = f"batch {batch}{instead}: best for momentum by training loss, one seed"
    return Claim(statement, paper, measured, paper == measured)


def _costs_less(comparison: Comparison, batch: int) -> Claim:
    """Compare what a smaller batch costs both methods, each tuned: the theory needs no large ones for momentum."""
    largest, changes, texts = comparison.batches[0], [], []
    for method, vanilla in (("momentum", False), ("vanilla", True)):
        ends = [comparison.summary(comparison.tuned(size, vanilla=vanilla), "train_loss") for size in (largest, batch)]
        texts.append(f"{method} {' → '.join('diverged' if end is None else f'{end.mean:.3f}' for end in ends)}")
        before, after = (math.inf if end is None else end.mean for end in ends)
        changes.append(math.inf if math.isinf(after) else after - before)
    statement = f"training loss: batch {batch} in place of {largest} costs momentum no more than vanilla"
    return Claim(statement, "yes", ", ".join(texts), changes[0] <= changes[1])


@in_ink
def draw(comparison: Comparison) -> Figure:
    """Draw each measure by epoch for both methods, tuned: the mean over seeds and the standard deviation."""
    figure, every = _panels(comparison)
    annealed = [run.setting for run in comparison.matching(annealed=True, seed=comparison.first_seed)]
    for axes, measure in every:
        for method, setting in _tuned(comparison, comparison.batches[0]).items():
            _draw_runs(axes, comparison, setting, measure, METHOD_COLOURS[method])
        for setting in annealed:
            _draw_runs(axes, comparison, setting, measure, METHOD_COLOURS["annealed"])
        axes.set(xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        _scale(axes, measure)
    return with_legend(figure, every[0][0])


@in_ink
def draw_batches(comparison: Comparison) -> Figure:
    """Draw each measure after the last epoch by batch size for both methods, tuned at each size."""
    figure, every = _panels(comparison)
    for axes, measure in every:
        for method in ("momentum", "vanilla"):
            ends = {
                batch: found
                for batch in comparison.batches
                if (found := comparison.summary(_tuned(comparison, batch)[method], measure.field)) is not None
            }
            middle = [found.mean for found in ends.values()]
            spread = [found.deviation or 0.0 for found in ends.values()]
            axes.errorbar(list(ends), middle, spread, color=METHOD_COLOURS[method], label=method, marker="o", capsize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(comparison.batches, [str(batch) for batch in comparison.batches])
        axes.set(xlabel="batch size")
        _scale(axes, measure)
    return with_legend(figure, every[0][0])


def _panels(comparison: Comparison) -> tuple[Figure, list[tuple[Axes, Measure]]]:
    """Return a figure with a panel for each measure that has one."""
    measures = [measure for measure in comparison.experiment.measures if measure.panel]
    figure, every = panels(len(measures), share_y=False)
    for axes, measure in zip(every, measures, strict=True):
        axes.set(title=measure.panel)
        axes.grid(alpha=0.3)
    return figure, list(zip(every, measures, strict=True))


def _tuned(comparison: Comparison, batch: int) -> dict[str, Setting]:
    """Return the best setting of each method at a batch size."""
    return {"momentum": comparison.tuned(batch, vanilla=False), "vanilla": comparison.tuned(batch, vanilla=True)}


def _scale(axes: Axes, measure: Measure) -> None:
    """Scale the vertical axis for what has been drawn."""
    if measure.from_zero:
        top = max(0.05, axes.get_ylim()[1])
        axes.set_ylim(-0.03 * top, top)
    low, high = axes.dataLim.intervaly
    if measure.log and high > WIDE * low > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))  # the axis spans few decades
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_runs(axes: Axes, comparison: Comparison, setting: Setting, measure: Measure, colour: str) -> None:
    every = comparison.seeds(setting)
    runs = [run for run in every if not run.diverged]
    if not runs:
        return
    values = np.array([[getattr(epoch, measure.field) for epoch in run.epochs] for run in runs])
    middle, spread = values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else np.zeros(values.shape[1])
    epochs = np.arange(1, values.shape[1] + 1)
    label = f"{_method(setting)}, lr {setting.lr:g}"
    label += f" ({len(runs)} of {len(every)} seeds)" if len(runs) < len(every) else ""
    axes.plot(epochs, middle, color=colour, linewidth=1.8, label=label)
    axes.fill_between(epochs, middle - spread, middle + spread, color=colour, alpha=FAINT, linewidth=0)


def _method(setting: Setting) -> str:
    """Return the name of the method of a run."""
    return (f"momentum {setting.momentum:g}" if setting.momentum else "vanilla") + ", annealed" * setting.annealed


def _table(comparison: Comparison) -> NumberTable:
    """Return the final measurements of every setting."""
    settings = sorted(
        {replace(record.setting, seed=comparison.first_seed) for record in comparison.records},
        key=lambda s: (-s.batch, s.momentum, s.annealed, -s.lr),
    )
    columns = ["method", "batch", "lr", "seeds", *(measure.column for measure in comparison.experiment.measures)]
    return NumberTable("All settings", columns, [_row(comparison, setting) for setting in settings], _note(comparison))


def _note(comparison: Comparison) -> str:
    """Explain F, where it is measured, with the numbers of both methods; and batch sizes that are not the paper's."""
    batch, notes = comparison.batches[0], []
    stand_ins = [size for size in comparison.batches if size in comparison.experiment.stands_for]
    if stand_ins:
        ours, theirs = (
            ", ".join(str(size) for size in sizes)
            for sizes in (stand_ins, [comparison.experiment.stands_for[size] for size in stand_ins])
        )
        notes.append(
            f"Batches of {ours} take the place of the paper's {theirs}: on so few images they make about as many steps "
            "per epoch, and hence noise, as those do on CIFAR-10."
        )
    if OBJECTIVE in comparison.experiment.measures:
        methods = {"with momentum": False, "without": True}
        tuned = {text: comparison.tuned(batch, vanilla=vanilla) for text, vanilla in methods.items()}
        ended = [
            f"{measure.column} = {found.text(measure.form)} {text}"
            for measure in (PENALTY, OBJECTIVE)
            for text, setting in tuned.items()
            if (found := comparison.summary(setting, measure.field)) is not None
        ]
        notes.append(
            "F = f + ψ, the training loss plus the penalty, is what all methods minimise; the paper shows f only. They "
            "can disagree: under batch normalisation f does not change if all weights before it are scaled, while ψ is "
            "proportional to them. So a method may be ahead in training loss and behind in F because its weights have "
            f"grown more, or have not yet shrunk as far. At batch {batch}, each method tuned, runs end at "
            f"{', '.join(ended)}."
        )
    return " ".join(notes)


def _row(comparison: Comparison, setting: Setting) -> list[str]:
    def measured(measure: Measure) -> str:
        found = comparison.summary(setting, measure.field)
        return "diverged" if found is None else found.text(measure.form)

    return [
        _method(setting),
        str(setting.batch),
        f"{setting.lr:g}",
        str(len(comparison.seeds(setting))),
        *map(measured, comparison.experiment.measures),
    ]
