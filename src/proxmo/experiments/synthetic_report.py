"""The section of the synthetic quadratic in the report: claims, figures and tables."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proxmo.experiments import synthetic
from proxmo.experiments.figures import FAINT, INK, METHOD_COLOURS, in_ink, panels, to_svg, with_legend
from proxmo.experiments.report import Claim, NumberTable, Picture, Section
from proxmo.plot.style import BLUE, GREEN, ORANGE, PINK

# Section 8.1: the level around which vanilla oscillates with batch size 1, and the best (M, γ) of momentum, by σ.
PAPER_FLOOR = {5.0: 22.0, 25.0: 672.0, 125.0: 14381.0}
PAPER_TUNED = {5.0: (10.0, 1e-2), 25.0: (10.0, 1e-3), 125.0: (100.0, 1e-4)}
CLOSE = 0.2  # a floor agrees with the paper's if they differ by at most this fraction
VANILLA_COLOURS = dict(zip(synthetic.BATCHES, (BLUE, GREEN, PINK), strict=True))
METHOD_LABELS: dict[synthetic.Method, str] = {
    "momentum": "momentum, tuned",
    "vanilla": "vanilla, tuned",
    "plan": "momentum, planned",
    "decreasing": "γₖ = 1/(k+2)",
    "auto": "AutoProxSGD",
}
MAX_SAMPLES = 1e5


def section(paper: synthetic.Results, shifted: synthetic.Results, settings: dict[str, str]) -> Section:
    """Return the section for the results on both quadratics."""
    return Section(
        synthetic.Synthetic.name,
        synthetic.Synthetic.title,
        "f = ½‖x‖² in five dimensions, ψ = 5000‖x‖², and gradients of f with noise of variance σ². The vanilla method "
        "stalls near σ², or at a third of it with the shortest steps; momentum gets below.",
        [
            Picture(
                to_svg(draw_paper_methods(paper), "synthetic"),
                "‖∇F‖² against gradient samples, with M and γ tuned for the smallest final error. Thin: one run. "
                f"Thick: mean of {paper.seeds}.",
            ),
            Picture(
                to_svg(draw_all_methods(paper), "methods"),
                "The same problem with methods that are not in the paper: lr and momentum from theory, γₖ = 1/(k+2), "
                f"and AutoProxSGD, which tunes itself (mean of {synthetic.AUTO_SEEDS} seeds).",
            ),
            Picture(
                to_svg(draw_all_methods(shifted), "shifted"),
                "A shifted quadratic, f = ½‖x‖² − 10·Σx and ψ = ½‖x‖², where ∇f varies along the path and does not "
                "vanish at the solution.",
            ),
        ],
        claims(paper),
        [_table("The paper’s quadratic", paper), _table("The shifted quadratic", shifted)],
        settings,
    )


def claims(results: synthetic.Results) -> list[Claim]:
    """Compare with the paper at each noise level: floors, which methods reach the tolerance, the best M and γ."""
    found = []
    for sigma in synthetic.SIGMAS:
        at = f"σ = {sigma:g}: "
        floor = results.cells[results.find("vanilla", sigma, M=10.0)].stationary
        lowest = results.cells[results.best("vanilla", sigma)]
        measured = f"{short(floor)}; {short(lowest.stationary)} with M = {short(lowest.M or 0)}"
        agrees = math.isclose(floor, PAPER_FLOOR[sigma], rel_tol=CLOSE)
        found.append(
            Claim(at + "vanilla, batch 1, M = 10, oscillates around", short(PAPER_FLOOR[sigma]), measured, agrees)
        )
        for batch in synthetic.BATCHES:
            share = max(results.cells[i].hit_share for i in results.indices("vanilla", sigma, batch=batch))
            reaches = batch > 1 and sigma == 5
            found.append(_reaches(at + f"vanilla, batch {batch}, best M", reaches, share))
        M, gamma = PAPER_TUNED[sigma]
        share = results.cells[results.find("momentum", sigma, M=M, gamma=gamma)].hit_share
        found.append(_reaches(at + f"momentum with M = {M:g}, γ = {gamma:g}", True, share))
        tuned = fastest(results, sigma)
        gammas, sizes = (sorted({getattr(cell, field) for cell in tuned}) for field in ("gamma", "M"))
        for name, paper, best in (("γ", gamma, gammas), ("M", M, sizes)):
            measured = " or ".join(f"{value:g}" for value in best) or "none for half of the seeds"
            found.append(
                Claim(at + f"{name} that reaches it with the fewest samples", f"{paper:g}", measured, paper in best)
            )
    return found


def fastest(results: synthetic.Results, sigma: float) -> list[synthetic.CellResult]:
    """Return the momentum settings that reach the tolerance with the fewest samples (median); none if half never do."""
    cells = [results.cells[i] for i in results.indices("momentum", sigma, batch=1)]
    fewest = min((cell.median_samples for cell in cells if cell.median_samples is not None), default=None)
    return [] if fewest is None else [cell for cell in cells if cell.median_samples == fewest]


def _reaches(statement: str, reaches: bool, share: float) -> Claim:
    return Claim(
        statement + f" reaches {synthetic.TOLERANCE:g}",
        "yes" if reaches else "no",
        f"{share:.0%} of the seeds",
        (share >= 0.5) == reaches,
    )


def short(number: float) -> str:
    """Format with three digits, or as a whole number from 100 on."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


@in_ink
def draw_paper_methods(results: synthetic.Results) -> Figure:
    """Draw ‖∇F‖² against gradient samples for the paper's methods, one panel per noise level."""
    figure, every = panels(len(synthetic.SIGMAS), share_y=True)
    for axes, sigma in zip(every, synthetic.SIGMAS, strict=True):
        for batch, colour in VANILLA_COLOURS.items():
            _draw_cell(axes, results, results.best("vanilla", sigma, batch), f"vanilla, batch {batch}", colour)
        tuned = results.best("momentum", sigma)
        _draw_cell(axes, results, tuned, "momentum, batch 1", ORANGE)
        axes.set_title(f"σ = {sigma:g} (momentum: γ = {results.cells[tuned].gamma:g})")
        _draw_tolerance(axes)
    return with_legend(figure, every[0])


@in_ink
def draw_all_methods(results: synthetic.Results) -> Figure:
    """Draw the same for all methods, including those that are not in the paper."""
    figure, every = panels(len(synthetic.SIGMAS), share_y=True)
    for axes, sigma in zip(every, synthetic.SIGMAS, strict=True):
        for method, label in METHOD_LABELS.items():
            _draw_cell(axes, results, results.best(method, sigma), label, METHOD_COLOURS[method])
        axes.set_title(f"σ = {sigma:g}")
        _draw_tolerance(axes)
    return with_legend(figure, every[0])


def _draw_cell(axes: Axes, results: synthetic.Results, index: int, label: str, colour: str) -> None:
    """Draw one run as a thin line and the mean over seeds as a thick one."""
    batch, curve = results.cells[index].batch, results.curves[index]
    samples = curve.iterations * batch
    shown = samples <= MAX_SAMPLES
    axes.plot(samples[shown], curve.one_run[shown], color=colour, alpha=FAINT, linewidth=0.7)
    axes.plot(samples[shown], curve.mean[shown], color=colour, linewidth=1.8, label=label)


def _draw_tolerance(axes: Axes) -> None:
    axes.axhline(synthetic.TOLERANCE, color=INK, linestyle=":", linewidth=1)
    axes.annotate("tolerance 0.02", (1.2, synthetic.TOLERANCE), va="bottom", fontsize=9, color=INK)
    axes.set(xscale="log", yscale="log", xlabel="gradient samples")
    axes.set_xlim(1, MAX_SAMPLES)
    axes.grid(alpha=0.3)
    if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axes.set_ylabel("‖∇F(x)‖²")


def _table(title: str, results: synthetic.Results) -> NumberTable:
    rows = []
    for sigma in synthetic.SIGMAS:
        indices = [results.best("vanilla", sigma, batch) for batch in synthetic.BATCHES]
        indices += [results.best(method, sigma) for method in METHOD_LABELS if method != "vanilla"]
        for index in indices:
            cell = results.cells[index]
            batch = f", batch {cell.batch}" if cell.method == "vanilla" else ""
            rows.append(
                [
                    METHOD_LABELS[cell.method] + batch,
                    f"{sigma:g}",
                    "" if cell.M is None else short(cell.M),
                    "" if cell.gamma is None else f"{cell.gamma:.3g}",
                    f"{cell.hit_share:.0%}",
                    "" if cell.median_samples is None else f"{cell.median_samples:,.0f}",
                    short(cell.stationary),
                    "" if cell.closed_form is None else short(cell.closed_form),
                ]
            )
    return NumberTable(
        title,
        ["method", "σ", "M", "γ", "reach 0.02", "samples", "error", "theory"],
        rows,
        f"{results.seeds} seeds, {results.iterations:,} iterations ({synthetic.AUTO_SEEDS} seeds for AutoProxSGD). "
        "Tuned for the smallest error. Reach: the share of seeds that were at or below 0.02 at any time, including "
        "beyond the right end of the figure. Samples: the median until then. Error: the mean of ‖∇F‖² over the last "
        "tenth. Theory: the limit of the error.",
    )
