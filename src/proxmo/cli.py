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

from proxmo.experiments import synthetic
from proxmo.files import written_whole

app = typer.Typer(no_args_is_help=True, add_completion=False)

# Section 8.1 of the paper: where vanilla with batch 1 oscillates, and the tuned γ of the momentum method.
PAPER_FLOOR = {5.0: 22.0, 25.0: 672.0, 125.0: 14381.0}
PAPER_GAMMA = {5.0: 1e-2, 25.0: 1e-3, 125.0: 1e-4}


@app.callback()
def main() -> None:
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


def summary(results: synthetic.Results) -> Table:
    """The tuned cell of each method and noise level, and vanilla at an ordinary M, beside what the paper reports."""
    table = Table(
        title=f"‖∇F‖² on the quadratic, {results.seeds} seeds",
        caption="Best M and γ of the grid, and vanilla at M = 10. hit: share of seeds at or below 0.02 within 10⁴ "
        "iterations; samples: the median until then; error: mean over the last tenth; theory: its limit.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("σ", "method", "M", "γ", "hit", "samples", "error", "theory", "paper"):
        table.add_column(column, justify="left" if column in ("method", "paper") else "right", no_wrap=True)
    for sigma in synthetic.SIGMAS:
        batches = [results.best("vanilla", sigma, batch) for batch in synthetic.BATCHES]
        for index in (results.find("vanilla", sigma, M=10.0), *batches, results.best("momentum", sigma)):
            cell = results.cells[index]
            table.add_row(
                f"{sigma:g}",
                f"{cell.method} ×{cell.batch}" if cell.batch > 1 else cell.method,
                _power(cell.M),
                _power(cell.gamma),
                f"{cell.hit_share:.0%}",
                "–" if cell.median_samples is None else f"{cell.median_samples:,.0f}",
                _short(cell.stationary),
                _short(cell.closed_form),
                _paper_says(cell),
            )
        table.add_section()
    return table


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _power(number: float) -> str:
    """A power of ten, as the grids are made of."""
    return f"1e{math.log10(number):.0f}" if number != 1 else "1"


def _paper_says(cell: synthetic.CellResult) -> str:
    if cell.method == "momentum":
        return f"hits, γ = {_power(PAPER_GAMMA[cell.sigma])}"
    if cell.batch == 1:
        return f"≈ {_short(PAPER_FLOOR[cell.sigma])}"
    return "hits" if cell.sigma == 5 else "misses"


def _make_writable(folder: Path) -> None:
    """Find out before the work whether its results can be stored."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {folder}: {error.strerror}", param_hint="--out") from error
