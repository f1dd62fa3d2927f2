"""Measure how well a share of weights or units is removed, and at what accuracy: `python -m benchmarks.targets`.

`Trimmed` with `KeepScheduler` stands beside gradual and one-shot magnitude pruning, ℓ1 and ℓ2,1 with a strength that is
searched for, torchao's pruning-aware training if it is installed, and, for units, a network of the resulting widths
trained from scratch. Tasks are in `targets_tasks`, methods in `targets_methods`. Every run writes a record to the
folder of results. Records that are there are not run again, so that the benchmark can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.output import write
from benchmarks.targets_methods import METHODS, Job, Kind, methods_for
from benchmarks.targets_report import COLUMNS, Record, draw, rows
from benchmarks.targets_tasks import TASKS, Folders, Task
from proxmo.experiments.data import FASHION_FOLDER
from proxmo.experiments.threads import one_thread
from proxmo.files import written_whole

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


def read(path: Path) -> Record | None:
    return Record(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def perform(run: Run, task: Task, out: Path) -> Record:
    """Train, and write the record."""
    trimmed = read(Run(run.task, run.kind, run.target, "trimmed", run.seed).path(out))
    first_seed = read(Run(run.task, run.kind, run.target, run.method, 0).path(out))
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
    record = Record(**asdict(run), metric=task.metric, **outcome._asdict(), seconds=time.perf_counter() - start)
    path = run.path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
    return record


def perform_all(runs: list[Run], folders: Folders, out: Path) -> None:
    """Perform the runs that have no record yet, and say after each how long the others may take."""
    missing = [run for run in runs if not run.path(out).exists()]
    tasks: dict[str, Task] = {}
    start = time.perf_counter()
    for done, run in enumerate(missing, 1):
        if run.task not in tasks:
            tasks[run.task] = TASKS[run.task](folders)
        record = perform(run, tasks[run.task], out)
        minutes = (time.perf_counter() - start) / done * (len(missing) - done) / 60
        result = f"{record.metric} {record.score:.4f}, removed {record.removed:.2%}, {record.seconds:.1f} s"
        print(f"[{done}/{len(missing)}] {run}: {result}; about {minutes:.0f} min left", flush=True)


def report(runs: list[Run], out: Path) -> None:
    """Write the table, the figure and all numbers of the records that are there."""
    records = [record for run in runs if (record := read(run.path(out))) is not None]
    if not records:
        raise SystemExit(f"no records in {out}")
    write(out, "targets", [asdict(record) for record in records], draw(records), COLUMNS, rows(records))


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
