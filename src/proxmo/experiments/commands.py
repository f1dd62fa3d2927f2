"""The subcommands of the command `proxmo`."""

from __future__ import annotations

import math
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import proxmo
from proxmo import theory
from proxmo.experiments.check import Check
from proxmo.experiments.data import LOADERS, DataError, default_root
from proxmo.experiments.experiment import STRENGTH, Options, Resources
from proxmo.experiments.fetch import fetch_cifar10
from proxmo.experiments.regime_checks import CONSTANTS, noticed_factors
from proxmo.experiments.report import Claim
from proxmo.experiments.reproduction import EXPERIMENTS, Outcome, merge
from proxmo.experiments.reproduction import reproduce as run
from proxmo.experiments.store import StoreError
from proxmo.experiments.synthetic import Synthetic
from proxmo.experiments.threads import one_thread
from proxmo.experiments.verification import RUNS, all_checks

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"proxmo {proxmo.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Proximal optimization for PyTorch."""


class ExperimentOption(str, Enum):
    """One member per experiment, and one for all of them."""

    _ignore_ = "option"
    for option in EXPERIMENTS:
        vars()[option] = option
    all = "all"


class PresetOption(str, Enum):
    """The sizes of the training experiments."""

    quick = "quick"
    medium = "medium"
    paper = "paper"


class DataOption(str, Enum):
    """One member per data set."""

    _ignore_ = "option"
    for option in LOADERS:
        vars()[option] = option


class FetchOption(str, Enum):
    """The data sets that can be fetched."""

    cifar10 = "cifar10"


@app.command()
def reproduce(
    context: typer.Context,
    experiment: Annotated[
        ExperimentOption, typer.Argument(help="Which experiment of the paper to run.")
    ] = ExperimentOption.all,
    preset: Annotated[
        PresetOption,
        typer.Option(help="quick: minutes on a laptop. medium: hours, on cifar10. paper: days without an accelerator."),
    ] = PresetOption.quick,
    data: Annotated[
        DataOption | None,
        typer.Option(help="Images to train on. Default: the built-in digits with --preset quick, else cifar10."),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder with the images, if not the default one.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Independent runs. Default: 50 on the quadratic (always 3 of AutoProxSGD), 3 of networks, 2 with "
            "--preset medium.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report and the numbers.")] = Path("proxmo-results"),
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, …")] = "cpu",
    strength: Annotated[float, typer.Option(min=0, help="Strength of the penalty in regularized training.")] = STRENGTH,
    first_seed: Annotated[
        int,
        typer.Option(min=0, max=2**31, help="The first seed. Change it to run other seeds on another machine."),
    ] = 0,
    only: Annotated[
        str | None, typer.Option(metavar="I/N", help="Run only every N-th job, from the I-th on: a share of the grid.")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Train as Slurm jobs; without Slurm, as local processes.")
    ] = False,
    cluster_options: Annotated[
        str, typer.Option(help="Options of sbatch, such as partition=gpu,gpus_per_node=1,time=600 (minutes).")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the runs in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bars.")] = False,
) -> None:
    """Run the experiments of the paper and write a report of what agrees with it and what does not."""
    context.with_resource(_temporary_matplotlib_folder())
    chosen = EXPERIMENTS.values() if experiment is ExperimentOption.all else [EXPERIMENTS[experiment.value]]
    images = data.value if data else "digits" if preset is PresetOption.quick else "cifar10"
    if not math.isfinite(strength):
        raise typer.BadParameter(f"must be a number >= 0, got {strength}", param_hint="--strength")
    resources = _cluster_resources(cluster_options, cluster=cluster)
    if cluster and experiment.value == Synthetic.name:
        raise typer.BadParameter("the quadratic runs here, in a minute; leave it out", param_hint="--cluster")
    checked = _check_device(device, here=resources is None)
    options = Options(preset.value, images, root, seeds, checked, strength, first_seed, _share(only), resources)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=quiet) as progress:
            tasks: dict[str, TaskID] = {}

            def bar(name: str, done: int, total: int) -> None:
                if name not in tasks:
                    tasks[name] = progress.add_task(name, total=total)
                progress.update(tasks[name], total=total, advance=done)

            outcome = run(chosen, options, out, bar, resume=resume)
    except (DataError, StoreError) as error:
        _fail(error)
    shares = "put the folders of all shares together with: proxmo report FOLDER FOLDER …"
    _print_outcome(outcome, console, shares if only else "train them with --resume")


def _print_outcome(outcome: Outcome, console: Console, advice: str) -> None:
    """Print what was found; if runs are missing, name one, and give the advice."""
    for section in outcome.sections:
        console.print(claims_table(section.title, section.claims))
    if outcome.report is not None:
        typer.echo(f"numbers: {outcome.numbers}\nreport:  {outcome.report}")
    if outcome.missing:
        typer.echo(f"missing runs: {len(outcome.missing)}, such as {outcome.missing[0]}; {advice}")


@app.command()
def report(
    context: typer.Context,
    folders: Annotated[list[Path], typer.Argument(help="Output folders of `proxmo reproduce`.")],
    out: Annotated[Path, typer.Option(help="New folder for all runs and the report.")] = Path("proxmo-report"),
) -> None:
    """Merge the results of several machines into one report."""
    context.with_resource(_temporary_matplotlib_folder())
    try:
        outcome = merge(folders, out)
    except StoreError as error:
        _fail(error)
    advice = "; ".join(
        f"train them with: {command} --resume --out {shlex.quote(str(out))}" for command in outcome.commands
    )
    _print_outcome(outcome, Console(), advice or "train them in the folders of their seeds, then merge again")


@app.command()
def data(
    name: Annotated[FetchOption, typer.Argument(help="The data set.")],
    root: Annotated[Path | None, typer.Option(help="Target folder. Default: $PROXMO_DATA or the user's cache.")] = None,
) -> None:
    """Download a data set and check each file against the md5 of the original."""
    try:
        fetch_cifar10(root or default_root(), typer.echo)
    except (DataError, StoreError, OSError) as error:
        _fail(error)


@app.command()
def plan(
    smoothness: Annotated[float, typer.Option(help="L, the smoothness of f.")],
    noise_variance: Annotated[float, typer.Option(help="σ², the total variance of a gradient sample.")],
    initial_gap: Annotated[float, typer.Option(help="F(x₀) − F*, or a bound on it.")],
    horizon: Annotated[int | None, typer.Option(help="Number of steps. Default: 10000 if no target is given.")] = None,
    target: Annotated[float | None, typer.Option(help="Largest acceptable mean of ‖∇F‖².")] = None,
    target_variance: Annotated[
        float | None, typer.Option(help="Largest acceptable mean of ‖m−∇f‖², for the regimes that bound it.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples in the first gradient.")] = 1,
) -> None:
    """Show lr, momentum and guarantee for each regime of the theory."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("regime", no_wrap=True)
    for column in ("lr", "1−momentum", "steps", "‖∇F‖²≤", "‖m−∇f‖²≤", "prox err."):
        table.add_column(column, justify="right", no_wrap=True)
    names = [name for name, row in theory.REGIMES.items() if target_variance is None or row.variance_descent]
    for name in names:
        try:
            found = theory.plan(
                name,
                smoothness=smoothness,
                noise_variance=noise_variance,
                initial_gap=initial_gap,
                horizon=horizon,
                target=target,
                target_variance=target_variance,
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
        "With an exact prox, use convex if ψ is convex, else monotone; the paper's rows are for comparison. Inexact "
        "rows allow a squared prox error in each step. All bounds hold for every problem with these constants.",
        highlight=False,
    )


@app.command()
def verify(
    horizon: Annotated[int, typer.Option(min=10, help="Steps of each Monte Carlo run.")] = 500,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bar.")] = False,
) -> None:
    """Check the bounds numerically (about ten seconds) and show how wrong a constant must be to be noticed."""
    console = Console()
    found: list[Check] = []
    with one_thread(), Progress(console=console, disable=quiet) as progress:
        for check in progress.track(all_checks(horizon), description="checks"):
            found += check()
    console.print(_checks_table(found, horizon))
    console.print(_noticed_table())
    if not all(one.holds for one in found):
        raise typer.Exit(code=1)


def _checks_table(found: list[Check], horizon: int) -> Table:
    table = Table(
        title="left ≤ right in every row; it would fail if left were larger by the factor",
        caption="Left is the observed value (for vanilla: σ²/4), right the bound. line: the worst steps on a line. "
        "quadratic: exact moments. formula: two bounds. ℓ1 and ℓ∞,1: a non-convex regression, means of "
        f"{RUNS} runs of {horizon} steps. S: squared error of an inexact prox. docs/theory.md has the details.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("statement", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for column in ("left", "right", "factor", "ok"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        numbers = (f"{one.observed:.2g}", f"{one.bound:.2g}", f"{one.factor:.{2 if one.factor < 10 else 0}f}")
        table.add_row(one.statement, one.where, *numbers, "yes" if one.holds else "NO")
    return table


def _noticed_table() -> Table:
    table = Table(
        title="how many times too large/too small a constant must be for a check to fail",
        caption="–: not noticed up to 16; a weaker claim, such as a larger remainder, stays true.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("constant", no_wrap=True)
    for name in theory.REGIMES:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    factors = [noticed_factors(row) for row in theory.REGIMES.values()]
    for constant in CONSTANTS:
        cells = (found.get(constant) for found in factors)
        texts = ("/\n".join("–" if one is None else f"{one:.3g}" for one in pair) if pair else "" for pair in cells)
        table.add_row(constant.replace("_", "\n"), *texts)
    return table


def claims_table(title: str, claims: list[Claim]) -> Table:
    """Return a table of the paper's statements and the measurements."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("statement", "paper", "measured", ""):
        table.add_column(column)
    for claim in claims:
        table.add_row(claim.statement, claim.paper, claim.measured, "✓" if claim.agrees else "✗")
    return table


@contextmanager
def _temporary_matplotlib_folder() -> Iterator[None]:
    """Keep matplotlib from writing its font cache to the user's folders on import: only --out may be written to."""
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
    """Print the error without a traceback and exit."""
    typer.secho(f"proxmo: {error}", fg="red", err=True)
    raise typer.Exit(code=1) from error


def _share(only: str | None) -> tuple[int, int] | None:
    """Return (i, n) from the text i/n."""
    if only is None:
        return None
    first, slash, count = only.partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise typer.BadParameter(f"must be I/N with 1 <= I <= N, got {only!r}", param_hint="--only")
    return int(first), int(count)


def _cluster_resources(text: str, *, cluster: bool) -> Resources | None:
    """Return the options of jobs from the text key=value,key=value; ``None`` without a cluster."""
    if not cluster:
        if text:
            raise typer.BadParameter("is for --cluster only", param_hint="--cluster-options")
        return None
    if find_spec("submitit") is None:
        raise typer.BadParameter("needs submitit: pip install 'proxmo[cluster]'", param_hint="--cluster")
    found: Resources = {}
    for part in re.split(r",(?=[^,=]+=)", text) if text else ():  # values may have commas
        key, _, value = (piece.strip() for piece in part.partition("="))
        name = key.replace("-", "_")
        if not (name.isidentifier() and value):
            raise typer.BadParameter(f"must be key=value,key=value, got {part!r}", param_hint="--cluster-options")
        found[name] = value
    return found


def _check_device(device: str, *, here: bool) -> str:
    """Return the normalised name of a device; raise if there is none of that name, or if it cannot be used here."""
    try:
        torch.zeros(1, device=device).item() if here else torch.device(device)
    except Exception as error:  # the type depends on the device and on how torch was built
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(
            f"{device!r} cannot be used{' here' * here}: {reason}", param_hint="--device"
        ) from error
    return "cpu" if torch.device(device).type == "cpu" else device
