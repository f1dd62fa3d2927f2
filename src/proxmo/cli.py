"""The command `proxmo`."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import proxmo
from proxmo import theory
from proxmo.experiments import synthetic
from proxmo.experiments.threads import one_thread
from proxmo.files import written_whole

app = typer.Typer(no_args_is_help=True, add_completion=False)

# What section 8.1 of the paper reports: where vanilla with batch 1 oscillates, and the M and γ tuned for momentum.
PAPER_FLOOR = {5.0: 22.0, 25.0: 672.0, 125.0: 14381.0}
PAPER_TUNED = {5.0: (10.0, 1e-2), 25.0: (10.0, 1e-3), 125.0: (100.0, 1e-4)}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"proxmo {proxmo.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Proximal optimization for PyTorch."""


@app.command()
def reproduce(
    seeds: Annotated[int, typer.Option(min=1, help="Independent runs per setting.")] = 50,
    out: Annotated[Path, typer.Option(help="Folder for the figure and the numbers.")] = Path("proxmo-results"),
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Run the synthetic quadratic of the paper: vanilla against momentum, as a table and a figure."""
    from proxmo.experiments.figures import draw_synthetic

    console = Console()
    _make_writable(out)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=quiet,
    ) as progress:
        task = progress.add_task("synthetic quadratic", total=synthetic.ITERATIONS)
        results = synthetic.run(seeds, advance=lambda: progress.advance(task))
    figure_path, numbers_path = out / "synthetic.png", out / "results.json"
    with written_whole(figure_path) as path:
        draw_synthetic(results).savefig(path, dpi=150)
    with written_whole(numbers_path) as path:
        path.write_text(json.dumps({"synthetic": results.to_json()}, indent=1))
    console.print(summary(results))
    console.print(f"figure:  {figure_path}\nnumbers: {numbers_path}", highlight=False)


@app.command()
def plan(
    smoothness: Annotated[float, typer.Option(help="L, the smoothness of f.")],
    noise_variance: Annotated[float, typer.Option(help="σ², the total variance of a gradient sample.")],
    initial_gap: Annotated[float, typer.Option(help="F(x₀) − F*, or a bound on it.")],
    horizon: Annotated[int | None, typer.Option(help="How many steps, 10000 without a target.")] = None,
    target: Annotated[float | None, typer.Option(help="What the mean of ‖∇F‖² should be at most.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples in the first gradient.")] = 1,
) -> None:
    """Which lr and momentum theory gives, in each of its regimes, and what it promises."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("regime", no_wrap=True)
    for column in ("lr", "1−momentum", "steps", "‖∇F‖²≤", "‖m−∇f‖²≤", "prox err."):
        table.add_column(column, justify="right", no_wrap=True)
    for name in theory.REGIMES:
        try:
            found = theory.plan(
                name,
                smoothness=smoothness,
                noise_variance=noise_variance,
                initial_gap=initial_gap,
                horizon=horizon,
                target=target,
                batch=batch,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        table.add_row(
            name,
            f"{found.lr:.2g}",
            f"{found.gamma:.2g}",
            f"{found.horizon:,}" if found.horizon < 1e7 else f"{found.horizon:.2e}",
            f"{found.guarantee:.2g}",
            "" if found.variance_guarantee is None else f"{found.variance_guarantee:.2g}",
            "" if found.inexactness is None else f"{found.inexactness:.2g}",
        )
    console = Console()
    console.print(table)
    console.print(
        "With an exact prox: convex if ψ is convex, else monotone; the paper's rows are for comparison. Inexact rows "
        "allow a squared prox error in each step. All are worst cases over every problem with these constants.",
        highlight=False,
    )


@app.command()
def verify(
    horizon: Annotated[int, typer.Option(min=10, help="Steps of each Monte Carlo run.")] = 500,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Check every bound numerically (about 20 seconds): what was observed beside what was promised."""
    from proxmo.experiments.verification import RUNS, Check, all_checks

    console = Console()
    found: list[Check] = []
    with one_thread(), Progress(console=console, disable=quiet) as progress:
        for check in progress.track(all_checks(horizon), description="checks"):
            found += check()
    table = Table(
        title="left ≤ right in every row; slack is right/left",
        caption="Left is what was observed (for vanilla: σ²/4), right what was promised. quadratic: exact, "
        "the tightest of all steps and settings; ℓ1 and ℓ∞,1: a non-convex regression, means of "
        f"{RUNS} runs of {horizon} steps; S: squared error of an inexact prox. docs/theory.md spells it out.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("statement", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for column in ("left", "right", "slack", "ok"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        numbers = (f"{one.observed:.3g}", f"{one.bound:.3g}", f"{one.slack:.3g}")
        table.add_row(one.statement, one.where, *numbers, "yes" if one.holds else "NO")
    console.print(table)
    if not all(one.holds for one in found):
        raise typer.Exit(code=1)


def summary(results: synthetic.Results) -> Table:
    """The settings that the paper names and the best of each method, beside what the paper says of them."""
    table = Table(
        title=f"‖∇F‖² on the quadratic, seeds: {results.seeds}",
        caption="M = 1/lr and γ = 1 − momentum, vanilla is momentum 0, ×16 a batch of 16; starred: the best M and γ of "
        "the grid by error. Reached: share of seeds that were at or below 0.02 at some time in 10⁴ iterations; "
        "samples: the median until then. Error: mean over the last tenth; theory: its limit. "
        "✓ or ✗: as in the paper or not.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("σ", "method", "M", "γ", "reached", "samples", "error", "theory", "paper"):
        table.add_column(column, justify="left" if column in ("method", "paper") else "right", no_wrap=True)
    for sigma in synthetic.SIGMAS:
        M, gamma = PAPER_TUNED[sigma]
        rows = [
            (results.find("vanilla", sigma, M=10.0), False),
            *((results.best("vanilla", sigma, batch), True) for batch in synthetic.BATCHES),
            (results.find("momentum", sigma, M=M, gamma=gamma), False),
            (results.best("momentum", sigma), True),
        ]
        for index, starred in rows:
            cell = results.cells[index]
            method = f"{cell.method} ×{cell.batch}" if cell.batch > 1 else cell.method
            table.add_row(
                f"{sigma:g}",
                method + (" *" if starred else ""),
                _power(cell.M),
                _power(cell.gamma),
                f"{cell.hit_share:.0%}",
                "–" if cell.median_samples is None else f"{cell.median_samples:,.0f}",
                _short(cell.stationary),
                _short(cell.closed_form),
                _compare_with_paper(cell, starred),
            )
        table.add_section()
    return table


def _compare_with_paper(cell: synthetic.CellResult, tuned: bool) -> str:
    """What the paper says of this setting, with a tick if it was so here and a cross if not."""
    if cell.method == "vanilla" and not tuned:
        claim = f"≈ {_short(PAPER_FLOOR[cell.sigma])}"
        agrees = math.isclose(cell.stationary, PAPER_FLOOR[cell.sigma], rel_tol=0.2)
    elif cell.method == "momentum" and tuned:
        return ""
    else:
        reaches = cell.method == "momentum" or (cell.batch > 1 and cell.sigma == 5)
        claim = "reaches" if reaches else "fails"
        agrees = (cell.hit_share >= 0.5) == reaches
    return f"{claim} {'✓' if agrees else '✗'}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _power(number: float) -> str:
    """A power of ten, as the grids are made of."""
    return f"1e{math.log10(number):.0f}" if number != 1 else "1"


def _make_writable(folder: Path) -> None:
    """Find out before the work whether its results can be stored."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {folder}: {error.strerror}", param_hint="--out") from error
