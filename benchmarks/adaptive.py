"""Measure sparse training with Adam's metric and with signs: `python -m benchmarks.adaptive`.

`ProxAdamW`, with a target and with strengths, and `ProxLion` stand beside AdamW with gradual magnitude pruning, with
torchao's pruning-aware training if it is installed, with ℓ1 in the loss, and with a plain soft threshold, and beside
`ProxSGD`; on rows of weight matrices beside RAMDA, if its repository is on the path. Tasks are in `targets_tasks`,
methods in `adaptive_methods` and `adaptive_rows`. Each method has an lr of its own: the best of three with another seed
at a middle target, for methods with strengths by the line through two of them. Every run writes a record to the folder
of results. Records that are there are not run again, so that the benchmark can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.adaptive_methods import METHODS, TARGETS, methods_for
from benchmarks.adaptive_report import LOOKS, Record, Run, as_targets, score_at
from benchmarks.output import write
from benchmarks.records import perform_missing, read
from benchmarks.targets_methods import Job, Kind
from benchmarks.targets_report import columns, draw, rows
from benchmarks.targets_tasks import TASKS, Folders, Task
from proxmo.experiments.data import FASHION_FOLDER
from proxmo.experiments.threads import one_thread

CHOICE_SEED = 100  # lr is chosen with it
MIDDLE: dict[Kind, float] = {"elements": 0.9, "units": 0.75, "rows": 0.75}
LRS = {
    "adam": (3e-3, 1e-2, 3e-2),
    "lion": (1e-3, 3e-3, 1e-2),
    "ramda": (1e-2, 3e-2, 1e-1),
    "sgd": (0.5, 1.5, 5.0),  # times the lr of the task
}
SAME_LR = {"gradual-each": "gradual", "trimmed-block": "trimmed"}  # methods that take the lr that another has chosen
STRENGTHS: dict[Kind, tuple[float, ...]] = {
    "elements": (1e-4, 3e-4, 1e-3, 3e-3),
    "units": (3e-4, 1e-3, 3e-3, 1e-2),
    "rows": (1e-5, 3e-5, 1e-4, 3e-4),
}
SHARES_OF_STEP = (0.1, 0.3, 0.6, 0.9)  # strengths of the naive threshold, which is relative to Adam's step
TASK_NAMES = ("fashion-mlp", "bytes-transformer", "fashion-cnn", "cifar10-resnet")
ROWS_TASKS = ("fashion-mlp",)  # linear layers are all that RAMDA's repository takes
# Methods with strengths take many runs: on the tasks with longer ones only the two that came out best.
ALL_STRENGTHS_TASKS = ("fashion-mlp", "bytes-transformer")
BEST_STRENGTHS = ("prox-adamw", "l1-in-loss")


def choices(task: str, kind: Kind, method: str) -> list[Run]:
    """Return the runs among which lr is chosen."""
    method = SAME_LR.get(method, method)
    found = levels(kind, method)
    tried = found[:-1] if METHODS[method].strengths else tuple({MIDDLE[kind]}.intersection(found)) or found
    return [Run(task, kind, method, level, lr, CHOICE_SEED) for lr in LRS[METHODS[method].family] for level in tried]


def chosen_lr(runs: list[Run], out: Path) -> float | None:
    """Return the lr that is best at the middle target; ``None`` if some runs have no record."""
    records = [record for run in runs if (record := read(run.path(out), Record)) is not None]
    if len(records) < len(runs):
        return None
    sign = 1 if records[0].metric == "accuracy" else -1

    def score(lr: float) -> float:
        found = score_at([record for record in records if record.lr == lr], MIDDLE[records[0].kind], outside=True)
        return -math.inf if found is None else sign * found

    return max(dict.fromkeys(record.lr for record in records), key=score)


def levels(kind: Kind, method: str) -> tuple[float, ...]:
    if method == "dense":
        return (0.0,)
    if not METHODS[method].strengths:
        return TARGETS[kind]
    return SHARES_OF_STEP if method == "naive" else STRENGTHS[kind]


def settings(tasks: list[str], methods: list[str]) -> Iterator[tuple[str, Kind, str]]:
    """Yield the kinds of blocks and the methods to run on each task."""
    for task in tasks:
        for kind in TARGETS:
            names = ["dense", *methods_for(kind)] if kind == "elements" else methods_for(kind)
            yield from ((task, kind, name) for name in names if name in methods and _is_run(task, kind, name))


def _is_run(task: str, kind: Kind, method: str) -> bool:
    if kind == "rows":
        return task in ROWS_TASKS
    if not METHODS[method].strengths or task in ALL_STRENGTHS_TASKS:
        return True
    return method in BEST_STRENGTHS and kind == "elements"


def grid(tasks: list[str], methods: list[str], seeds: int, out: Path) -> Iterator[Run]:
    """Yield the runs with the lr that were chosen, task by task and seed by seed."""
    for task in tasks:
        for seed in range(seeds):
            for _, kind, method in settings([task], methods):
                lr = chosen_lr(choices(task, kind, method), out)
                if lr is not None:
                    yield from (Run(task, kind, method, level, lr, seed) for level in levels(kind, method))


def perform(run: Run, task: Task) -> Record:
    """Train, and return the record."""
    method = METHODS[run.method]
    lr = run.lr * task.lr if method.family == "sgd" else run.lr
    removed, strength = (0.0, run.level) if method.strengths else (run.level, None)
    job = Job(replace(task, lr=lr, exclude=()), run.kind, removed, run.seed, strength=strength)
    start = time.perf_counter()
    points = method.train(job)
    return Record(**asdict(run), metric=task.metric, points=points, seconds=time.perf_counter() - start)


def perform_all(tasks: list[str], methods: list[str], seeds: int, folders: Folders, out: Path) -> None:
    """Choose the lr of each method, then perform its runs, as far as they have no record yet."""
    for name in tasks:
        task = TASKS[name](folders)
        tried = dict.fromkeys(run for setting in settings([name], methods) for run in choices(*setting))
        perform_missing(list(tried), out, partial(perform, task=task))
        perform_missing(list(grid([name], methods, seeds, out)), out, partial(perform, task=task))


def report(runs: list[Run], out: Path) -> None:
    """Write the table, the figure and all numbers of the records that are there."""
    records = [record for run in runs if (record := read(run.path(out), Record)) is not None]
    if not records:
        raise SystemExit(f"no records in {out}")
    found = as_targets(records)
    write(
        out, "adaptive", [asdict(record) for record in records], draw(found, LOOKS), columns(LOOKS), rows(found, LOOKS)
    )


@one_thread()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASK_NAMES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fashion-mnist", type=Path, default=FASHION_FOLDER, help="folder with its idx files")
    parser.add_argument("--cifar10", type=Path, help="folder that it was fetched to; default: where proxmo puts it")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report the records that are there")
    parser.add_argument("--out", type=Path, default=Path("results/adaptive"))
    options = parser.parse_args(arguments)
    if "pat" not in methods_for("elements"):
        print("torchao is not installed: its pruning-aware training is left out")
    if "ramda" not in methods_for("rows"):
        print("RAMDA is not on the path: it is left out")
    if not options.report_only:
        perform_all(
            options.tasks, options.methods, options.seeds, Folders(options.fashion_mnist, options.cifar10), options.out
        )
    report(list(grid(options.tasks, options.methods, options.seeds, options.out)), options.out)


if __name__ == "__main__":
    main()
