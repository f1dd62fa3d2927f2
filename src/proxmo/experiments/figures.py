"""Figures of the experiments, as SVG whose lines and letters take the colour of the page around them."""

from __future__ import annotations

import io
import re

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from proxmo.experiments import synthetic
from proxmo.experiments.comparison import Comparison
from proxmo.experiments.training import Setting

# Okabe and Ito's palette: distinct for colour-blind readers too
ORANGE, BLUE, GREEN, PINK, SKY, YELLOW = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
VANILLA_COLOURS = dict(zip(synthetic.BATCHES, (BLUE, GREEN, PINK), strict=True))
METHOD_COLOURS = {"momentum": ORANGE, "vanilla": BLUE, "plan": SKY, "decreasing": YELLOW, "auto": GREEN}
METHOD_LABELS = {
    "momentum": "momentum, tuned",
    "vanilla": "vanilla, tuned",
    "plan": "momentum, planned",
    "decreasing": "γₖ = 1/(k+2)",
    "auto": "AutoProxSGD",
}
INK = "#010203"  # stands for the colour of the page's text
in_ink = mpl.rc_context(
    {"text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
)
FAINT = 0.2
MAX_SAMPLES = 1e5


@in_ink
def draw_synthetic(results: synthetic.Results) -> Figure:
    """‖∇F‖² against gradient samples, one panel per noise level: thin one run, thick the mean over seeds."""
    figure, panels = _panels(len(synthetic.SIGMAS), share_y=True)
    for axes, sigma in zip(panels, synthetic.SIGMAS, strict=True):
        for batch, colour in VANILLA_COLOURS.items():
            _draw_cell(axes, results, results.best("vanilla", sigma, batch), f"vanilla, batch {batch}", colour)
        tuned = results.best("momentum", sigma)
        _draw_cell(axes, results, tuned, "momentum, batch 1", ORANGE)
        axes.set_title(f"σ = {sigma:g} (momentum: γ = {results.cells[tuned].gamma:g})")
        _tolerance(axes)
    return _with_legend(figure, panels)


@in_ink
def draw_methods(results: synthetic.Results) -> Figure:
    """The same for the methods that the paper does not have."""
    figure, panels = _panels(len(synthetic.SIGMAS), share_y=True)
    for axes, sigma in zip(panels, synthetic.SIGMAS, strict=True):
        for method, colour in METHOD_COLOURS.items():
            index = results.best(method, sigma)  # type: ignore[arg-type]
            _draw_cell(axes, results, index, METHOD_LABELS[method], colour)
        axes.set_title(f"σ = {sigma:g}")
        _tolerance(axes)
    return _with_legend(figure, panels)


@in_ink
def draw_comparison(comparison: Comparison) -> Figure:
    """Training loss, test accuracy and, with a penalty, F and zeros by epochs: means of the seeds and deviations."""
    batch = comparison.batches[0]
    settings = {
        "momentum": comparison.tuned(batch, vanilla=False),
        "vanilla": comparison.tuned(batch, vanilla=True),
    }
    measures = {"train_loss": "training loss", "test_accuracy": "test accuracy"}
    if comparison.experiment == "regularized":
        measures |= {"objective": "F = f + ψ", "zero_weights": "share of zero weights"}
    figure, panels = _panels(len(measures), share_y=False)
    for axes, (measure, label) in zip(panels, measures.items(), strict=True):
        for method, setting in settings.items():
            _draw_runs(axes, comparison, setting, measure, method)
        axes.set(title=label, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        if measure == "zero_weights":
            top = max(0.05, axes.get_ylim()[1])
            axes.set_ylim(-0.03 * top, top)  # so that a line at zero is seen
        if measure in ("train_loss", "objective"):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))  # few decades
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    return _with_legend(figure, panels)


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page; ``name`` keeps its identifiers apart from those of other figures."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    width, height = (72 * inches for inches in figure.get_size_inches())
    # not narrower than it was drawn: its letters can be read, and on a phone it scrolls
    opening = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" style="min-width: {width:.0f}px">'
    return re.sub(r"^<svg [^>]*>", opening, svg, flags=re.DOTALL)


def _panels(count: int, *, share_y: bool) -> tuple[Figure, list[Axes]]:
    """At most three side by side, so that they can be read on a narrow page."""
    rows = 1 if count <= 3 else 2
    columns = -(-count // rows)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows + 0.5), layout="constrained")
    return figure, list(figure.subplots(rows, columns, sharey=share_y, squeeze=False).flatten())


def _with_legend(figure: Figure, panels: list[Axes]) -> Figure:
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, labelcolor=INK)
    return figure


def _tolerance(axes: Axes) -> None:
    axes.axhline(synthetic.TOLERANCE, color=INK, linestyle=":", linewidth=1)
    axes.annotate("tolerance 0.02", (1.2, synthetic.TOLERANCE), va="bottom", fontsize=9, color=INK)
    axes.set(xscale="log", yscale="log", xlabel="gradient samples")
    axes.set_xlim(1, MAX_SAMPLES)
    axes.grid(alpha=0.3)
    if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axes.set_ylabel("‖∇F(x)‖²")


def _draw_cell(axes: Axes, results: synthetic.Results, index: int, label: str, colour: str) -> None:
    batch, curve = results.cells[index].batch, results.curves[index]
    samples = curve.iterations * batch
    shown = samples <= MAX_SAMPLES
    axes.plot(samples[shown], curve.one_run[shown], color=colour, alpha=FAINT, linewidth=0.7)
    axes.plot(samples[shown], curve.mean[shown], color=colour, linewidth=1.8, label=label)


def _draw_runs(axes: Axes, comparison: Comparison, setting: Setting, measure: str, method: str) -> None:
    every = comparison.seeds(setting)
    runs = [run for run in every if not run.diverged]
    if not runs:
        return
    values = np.array([[getattr(epoch, measure) for epoch in run.epochs] for run in runs])
    middle, spread = values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else np.zeros(values.shape[1])
    epochs = np.arange(1, values.shape[1] + 1)
    label = f"{method}, lr {setting.lr:g}" + (f", momentum {setting.momentum:g}" if setting.momentum else "")
    label += f" ({len(runs)} of {len(every)} seeds)" if len(runs) < len(every) else ""
    axes.plot(epochs, middle, color=METHOD_COLOURS[method], linewidth=1.8, label=label)
    axes.fill_between(epochs, middle - spread, middle + spread, color=METHOD_COLOURS[method], alpha=FAINT, linewidth=0)
