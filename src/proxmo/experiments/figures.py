"""Figures of the experiments."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proxmo.experiments import synthetic

# Okabe and Ito's palette: distinct for colour-blind readers too
MOMENTUM, *VANILLA = "#D55E00", "#0072B2", "#009E73", "#CC79A7"
FAINT = 0.15
MAX_SAMPLES = 1e5


def draw_synthetic(results: synthetic.Results) -> Figure:
    """‖∇F‖² against gradient samples, one panel per noise level: thin one run, thick the mean over seeds."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = figure.subplots(1, len(synthetic.SIGMAS), sharey=True)
    for axes, sigma in zip(panels, synthetic.SIGMAS, strict=True):
        for batch, colour in zip(synthetic.BATCHES, VANILLA, strict=True):
            _draw_cell(axes, results, results.best("vanilla", sigma, batch), f"vanilla, batch {batch}", colour)
        tuned = results.best("momentum", sigma)
        _draw_cell(axes, results, tuned, "momentum, batch 1", MOMENTUM)
        axes.axhline(synthetic.TOLERANCE, color="black", linestyle=":", linewidth=1)
        axes.annotate("tolerance 0.02", (1.2, synthetic.TOLERANCE), va="bottom", fontsize=9)
        title = f"σ = {sigma:g} (momentum with γ = {results.cells[tuned].gamma:g})"
        axes.set(xscale="log", yscale="log", title=title, xlabel="gradient samples")
        axes.set_xlim(1, MAX_SAMPLES)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("‖∇F(x)‖²")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"10⁴ iterations on the noisy quadratic, M and γ tuned. Thin: one run; thick: mean of {results.seeds}"
    )
    return figure


def _draw_cell(axes: Axes, results: synthetic.Results, index: int, label: str, colour: str) -> None:
    batch, curve = results.cells[index].batch, results.curves[index]
    samples = np.arange(1, results.iterations + 1) * batch
    shown = samples <= MAX_SAMPLES
    axes.plot(samples[shown], curve.one_run[shown], color=colour, alpha=FAINT, linewidth=0.6)
    axes.plot(samples[shown], curve.mean[shown], color=colour, linewidth=1.8, label=label)
