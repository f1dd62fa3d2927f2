"""The report: one page that needs nothing from elsewhere, with figures and tables of the experiments that were run."""

from __future__ import annotations

from dataclasses import dataclass

import jinja2

from proxmo.experiments import synthetic
from proxmo.experiments.claims import Claim, comparison_claims, short, synthetic_claims
from proxmo.experiments.comparison import Comparison
from proxmo.experiments.figures import METHOD_LABELS, draw_comparison, draw_methods, draw_synthetic, to_svg
from proxmo.experiments.training import Setting


@dataclass(frozen=True)
class Picture:
    """A figure and what it shows."""

    svg: str
    caption: str


@dataclass(frozen=True)
class NumberTable:
    """A table whose first column is a name and the others numbers, as text."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """One experiment."""

    name: str
    title: str
    text: str
    figures: list[Picture]
    claims: list[Claim]
    tables: list[NumberTable]
    settings: dict[str, str]
    """How it was made."""


def synthetic_section(paper: synthetic.Results, shifted: synthetic.Results, settings: dict[str, str]) -> Section:
    """Section 8.1, and the methods that it does not have."""
    return Section(
        "synthetic",
        "A noisy quadratic (section 8.1)",
        "f = ½‖x‖² in five dimensions, ψ = 5000‖x‖², and gradients of f with noise of variance σ². The vanilla method "
        "stalls near σ², and at a third of that with the shortest steps; momentum goes on below it.",
        [
            Picture(
                to_svg(draw_synthetic(paper), "synthetic"),
                "‖∇F‖² against gradient samples; M and γ tuned for the smallest error at the end. Thin: one run. "
                f"Thick: mean of {paper.seeds}.",
            ),
            Picture(
                to_svg(draw_methods(paper), "methods"),
                "The same problem with methods that the paper does not have: lr and momentum as theory plans them, "
                f"γₖ = 1/(k+2), and AutoProxSGD, which tunes itself (mean of {synthetic.AUTO_SEEDS} seeds).",
            ),
            Picture(
                to_svg(draw_methods(shifted), "shifted"),
                "A shifted quadratic, f = ½‖x‖² − 10·Σx and ψ = ½‖x‖², on which ∇f changes on the way and does not "
                "vanish at the solution.",
            ),
        ],
        synthetic_claims(paper),
        [_synthetic_table("The paper’s quadratic", paper), _synthetic_table("The shifted quadratic", shifted)],
        settings,
    )


def _synthetic_table(title: str, results: synthetic.Results) -> NumberTable:
    rows = []
    for sigma in synthetic.SIGMAS:
        indices = [results.best("vanilla", sigma, batch) for batch in synthetic.BATCHES]
        indices += [results.best(method, sigma) for method in ("momentum", "plan", "decreasing", "auto")]
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
        f"{results.seeds} seeds, {results.iterations:,} iterations ({synthetic.AUTO_SEEDS} seeds of AutoProxSGD). "
        "Tuned for the smallest error. Reach: share of the seeds that were at or below 0.02 at some time, also beyond "
        "the right end of the figure; samples: the median until then. Error: mean of ‖∇F‖² over the last tenth; "
        "theory: its limit.",
    )


def comparison_section(comparison: Comparison, data: str, settings: dict[str, str]) -> Section:
    """Section 8.2 or appendix A."""
    regularized = comparison.experiment == "regularized"
    width = comparison.records[0].setting.width
    epochs = comparison.records[0].setting.epochs
    what = (
        "ψ is ℓ∞,1 with strength 0.1 on the weights of every layer, one group per output channel."
        if regularized
        else "f = ℓ − ℓ̂ and ψ = ℓ̂, the loss on a small part of the training images; 20 inner SGD steps of 0.01."
    )
    picture = Picture(
        to_svg(draw_comparison(comparison), comparison.experiment),
        f"Each method tuned by training loss, over all in the table below: mean and deviation of seeds, batch "
        f"{comparison.batches[0]}.",
    )
    return Section(
        comparison.experiment,
        "Regularized training (section 8.2)" if regularized else "Proxy training (appendix A)",
        f"ResNet-18 of base width {width} on {data}, {epochs} epochs. {what}",
        [picture],
        comparison_claims(comparison),
        [_runs_table(comparison)],
        settings,
    )


def _runs_table(comparison: Comparison) -> NumberTable:
    """All settings, with what they ended at."""
    settings = sorted(
        {record.setting for record in comparison.records if record.setting.seed == 0},
        key=lambda s: (-s.batch, s.momentum, -s.lr),
    )
    columns = ["method", "batch", "lr", "seeds", "training loss", "test accuracy"]
    if comparison.experiment == "regularized":
        columns += ["F", "zero weights", "zero channels"]
    return NumberTable("All settings", columns, [_run_row(comparison, setting) for setting in settings])


def _run_row(comparison: Comparison, setting: Setting) -> list[str]:
    def said(measure: str, form: str) -> str:
        found = comparison.summary(setting, measure)
        return "diverged" if found is None else found.said(form)

    row = [
        f"momentum {setting.momentum:g}" if setting.momentum else "vanilla",
        str(setting.batch),
        f"{setting.lr:g}",
        str(len(comparison.seeds(setting))),
        said("train_loss", ".3f"),
        said("test_accuracy", ".1%"),
    ]
    if comparison.experiment == "regularized":
        row += [said("objective", ".3f"), said("zero_weights", ".1%"), said("zero_channels", ".1%")]
    return row


def render(sections: list[Section]) -> str:
    """The page."""
    claims = [claim for section in sections for claim in section.claims]
    agreeing = sum(claim.agrees for claim in claims)
    headline = (
        f"{agreeing} of {len(claims)} statements of the paper agree with what was measured here; the tables say which "
        "do not."
    )
    loader = jinja2.PackageLoader("proxmo.experiments")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("report.html").render(headline=headline, sections=sections)
