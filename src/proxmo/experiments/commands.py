"""The subcommands of the command `proxmo`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import proxmo
from proxmo import theory
from proxmo.experiments.threads import one_thread

if TYPE_CHECKING:
    from proxmo.experiments.claims import Claim

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"proxmo {proxmo.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Proximal optimization for PyTorch."""


class Experiment(str, Enum):
    """What can be reproduced."""

    synthetic = "synthetic"
    regularized = "regularized"
    proxy = "proxy"
    all = "all"


class PresetOption(str, Enum):
    """How large."""

    quick = "quick"
    paper = "paper"


class DataOption(str, Enum):
    """On which images."""

    digits = "digits"
    cifar10 = "cifar10"
    fashion_mnist = "fashion-mnist"


class FetchOption(str, Enum):
    """What can be fetched."""

    cifar10 = "cifar10"


@app.command()
def reproduce(
    context: typer.Context,
    experiment: Annotated[Experiment, typer.Argument(help="Which experiment of the paper.")] = Experiment.all,
    preset: Annotated[
        PresetOption, typer.Option(help="quick: minutes on a laptop. paper: days without an accelerator.")
    ] = PresetOption.quick,
    data: Annotated[
        DataOption | None,
        typer.Option(help="Images for the networks; if not given, digits, which are built in, or cifar10 with paper."),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where these images are, if not where they are expected.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Independent runs; if not given, 50 on the quadratic (AutoProxSGD always 3), 3 of nets."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report and the numbers.")] = Path("proxmo-results"),
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, …")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Run the experiments of the paper, and write a report of what agrees and what does not."""
    context.with_resource(_list_of_fonts_that_goes_away())
    from proxmo.experiments.data import DataError
    from proxmo.experiments.reproduction import EXPERIMENTS, Request
    from proxmo.experiments.reproduction import reproduce as run
    from proxmo.experiments.store import StoreError

    device = _usable(device)
    chosen = EXPERIMENTS if experiment is Experiment.all else (experiment.value,)
    images = data or (DataOption.cifar10 if preset is PresetOption.paper else DataOption.digits)
    request = Request(chosen, preset.value, images.value, root, seeds, device, out, resume)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=quiet) as progress:
            tasks: dict[str, TaskID] = {}

            def bar(name: str, done: int, total: int) -> None:
                if name not in tasks:
                    tasks[name] = progress.add_task(name, total=total)
                progress.update(tasks[name], total=total, advance=done)

            outcome = run(request, bar)
    except (DataError, StoreError) as error:
        _fail(error)
    for section in outcome.sections:
        console.print(claims_table(section.title, section.claims))
    typer.echo(f"numbers: {outcome.numbers}\nreport:  {outcome.report}")


@app.command()
def data(
    name: Annotated[FetchOption, typer.Argument(help="The data set.")],
    root: Annotated[Path | None, typer.Option(help="Where to; $PROXMO_DATA or the user's cache if not given.")] = None,
) -> None:
    """Fetch a data set, each file checked against the md5 of the original."""
    from proxmo.experiments.data import DataError, default_root
    from proxmo.experiments.fetch import fetch_cifar10
    from proxmo.experiments.store import StoreError

    try:
        fetch_cifar10(root or default_root(), typer.echo)
    except (DataError, StoreError, OSError) as error:
        _fail(error)


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


def claims_table(title: str, claims: list[Claim]) -> Table:
    """What the paper says beside what was measured."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("statement", "paper", "measured", ""):
        table.add_column(column)
    for claim in claims:
        table.add_row(claim.statement, claim.paper, claim.measured, "✓" if claim.agrees else "✗")
    return table


@contextmanager
def _list_of_fonts_that_goes_away() -> Iterator[None]:
    """matplotlib writes one into the user's folders when it is imported; only --out is to be written to."""
    if "MPLCONFIGDIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MPLCONFIGDIR"] = folder
        try:
            yield
        finally:
            del os.environ["MPLCONFIGDIR"]


def _fail(error: Exception) -> NoReturn:
    """Say what is wrong, without a traceback, and stop."""
    typer.secho(f"proxmo: {error}", fg="red", err=True)
    raise typer.Exit(code=1) from error


def _usable(device: str) -> str:
    """The device in one way of writing it, found before the work to be there."""
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # of many kinds, one for each way in which a device can be missing
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{device!r} cannot be used here: {reason}", param_hint="--device") from error
    return "cpu" if torch.device(device).type == "cpu" else device
