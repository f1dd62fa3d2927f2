"""Measure how well a share of weights or units is removed, and at what accuracy: `python -m benchmarks.targets`.

`Trimmed` with `KeepScheduler` stands beside gradual and one-shot magnitude pruning, ℓ1 and ℓ2,1 with a strength that is
searched for, torchao's pruning-aware training if it is installed, and, for units, a network of the resulting widths
trained from scratch. Tasks are in `targets_tasks`, methods in `targets_methods`. Every run writes a record to the
folder of results. Records that are there are not run again, so that the benchmark can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from benchmarks.output import write
from benchmarks.records import perform_missing, read
from benchmarks.targets_methods import METHODS, Job, Kind, methods_for
from benchmarks.targets_report import LOOKS, Record, columns, draw, rows
from benchmarks.targets_tasks import TASKS, Folders, Task
from proxmo.experiments.data import FASHION_FOLDER
from proxmo.experiments.threads import one_thread

SEARCHED = ("digits", "fashion-mlp")  # tasks on which a run is so short that a strength can be searched for
TARGETS: dict[Kind, tuple[float, ...]] = {"elements": (0.5, 0.8, 0.9, 0.95, 0.98), "units": (0.5, 0.75, 0.9)}


@dataclass(frozen=True)
class Run:
    """One point of the grid."""

    task: str
    kind: Kind
    target: float
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.kind}, {self.target:.0%}, {self.method}, seed {self.seed}"

    def path(self, out: Path) -> Path:
        name = f"{self.task}-{self.kind}-{self.target:g}-{self.method}-{self.seed}.json"
        return out / "records" / name


def grid(tasks: list[str], seeds: int) -> Iterator[Run]:
    """Yield all runs, seed by seed, those that need the record of another after it."""
    for seed in range(seeds):
        for task in tasks:
            yield Run(task, "elements", 0.0, "dense", seed)
            for kind, targets in TARGETS.items():
                for target in targets:
                    for method in methods_for(kind):
                        if method != "searched" or task in SEARCHED:
                            yield Run(task, kind, target, method, seed)


def perform(run: Run, task: Task, out: Path) -> Record:
    """Train, and return the record."""
    trimmed = read(Run(run.task, run.kind, run.target, "trimmed", run.seed).path(out), Record)
    first_seed = read(Run(run.task, run.kind, run.target, run.method, 0).path(out), Record)
    job = Job(
        task,
        run.kind,
        run.target,
        run.seed,
        widths=None if trimmed is None else trimmed.widths,
        strength=None if first_seed is None else first_seed.strength,
    )
    start = time.perf_counter()
    outcome = METHODS[run.method](job)
    return Record(**asdict(run), metric=task.metric, **outcome._asdict(), seconds=time.perf_counter() - start)


def perform_all(runs: list[Run], folders: Folders, out: Path) -> None:
    """Perform the runs that have no record yet."""
    tasks = cache(lambda name: TASKS[name](folders))
    perform_missing(runs, out, lambda run: perform(run, tasks(run.task), out))


def report(runs: list[Run], out: Path) -> None:
    """Write the table, the figure and all numbers of the records that are there."""
    records = [record for run in runs if (record := read(run.path(out), Record)) is not None]
    if not records:
        raise SystemExit(f"no records in {out}")
    write(
        out,
        "targets",
        [asdict(record) for record in records],
        draw(records, LOOKS),
        columns(LOOKS),
        rows(records, LOOKS),
    )


@one_thread()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fashion-mnist", type=Path, default=FASHION_FOLDER, help="folder with its idx files")
    parser.add_argument("--cifar10", type=Path, help="folder that it was fetched to; default: where proxmo puts it")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report the records that are there")
    parser.add_argument("--out", type=Path, default=Path("results/targets"))
    options = parser.parse_args(arguments)
    runs = list(grid(options.tasks, options.seeds))
    if not any(run.method == "pat" for run in runs):
        print("torchao is not installed: its pruning-aware training is left out")
    if not options.report_only:
        perform_all(runs, Folders(options.fashion_mnist, options.cifar10), options.out)
    report(runs, options.out)


if __name__ == "__main__":
    main()
