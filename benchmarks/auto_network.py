"""Compare AutoProxSGD with tuned ProxSGD and its peers on networks: `python -m benchmarks.auto_network`.

Tasks are in `targets_tasks`, methods in `auto_methods`. Compared are F = loss + ψ over the last tenth of the steps, on
training batches that are the same for all methods, then the score on data held out, and the share of zeros among the
penalised weights. The grid runs with one seed; the best constant and the best annealed cell by F of this seed, which is
hindsight, get the other seeds too. Every run writes a record to the folder of results. Records that are there are not
run again, so that the benchmark can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.auto_methods import CELLS, OWN, PEERS, Method, Weights, make, missing_packages
from benchmarks.auto_network_report import COLUMNS, Record, Run, best_cell, draw, rows
from benchmarks.output import write
from benchmarks.records import perform_missing, read
from benchmarks.targets_tasks import TASKS, Folders, Task
from proxmo import L1, GroupLInf, Penalty
from proxmo.experiments.data import FASHION_FOLDER
from proxmo.experiments.threads import one_thread

# Strengths that zero a part of the weights and leave most of F to the loss.
PENALTIES: dict[str, Penalty] = {
    "digits": GroupLInf(3e-3),
    "fashion-mlp": L1(1e-4),
    "fashion-cnn": L1(3e-4),
    "cifar10-resnet": GroupLInf(3e-3),
    "bytes-transformer": L1(3e-5),
}
LOOKS, BATCHES = 5, 8  # F is measured so many times in the last tenth, each time on so many batches
LOOK_SEED = 1000


def train(task: Task, penalty: Penalty, method: str, seed: int) -> tuple[float, float, float]:
    """Return F over the last tenth of the steps, the score, and the share of zeros; NaN if the run diverges."""
    torch.manual_seed(seed)
    network = task.make()
    weights = Weights(network, replace(penalty))
    running = make(method, weights, task.steps)
    batches = task.batches(torch.Generator().manual_seed(seed))
    looks = {task.steps - round(0.1 * task.steps * part / LOOKS) for part in range(LOOKS)}
    found = []
    network.train()
    for step in range(1, task.steps + 1):
        loss = task.loss(network, *next(batches))
        if not math.isfinite(loss.item()):
            return math.nan, math.nan, math.nan
        running.step(loss)
        if step in looks:
            found.append(objective(task, network, running))
    with running.result(), torch.no_grad():
        return sum(found) / len(found), task.score(network.eval()), weights.zeros()


@torch.no_grad()
def objective(task: Task, network: nn.Module, method: Method) -> float:
    """Return F at the point that the method would return, with BatchNorm as in training."""
    batches = task.batches(torch.Generator().manual_seed(LOOK_SEED))
    with method.result():
        losses = [task.loss(network, *next(batches)) for _ in range(BATCHES)]
        return float(torch.stack(losses).mean() + method.weights.penalty_value())


def first_runs(task: str, methods: list[str]) -> list[Run]:
    """Return the runs with the first seed."""
    return [Run(task, method, 0) for method in methods]


def further_runs(task: str, methods: list[str], seeds: int, out: Path) -> list[Run]:
    """Return the runs with further seeds: of all methods that need no grid, and of the best cells of the grid."""
    records = read_all(first_runs(task, methods), out)
    best = [best_cell(records, schedule) for schedule in ("constant", "cosine")]
    names = [name for name in methods if name not in CELLS] + [name for name in best if name is not None]
    return [Run(task, name, seed) for seed in range(1, seeds) for name in names]


def read_all(runs: list[Run], out: Path) -> list[Record]:
    return [record for run in runs if (record := read(run.path(out), Record)) is not None]


def perform(run: Run, task: Task, penalty: Penalty) -> Record:
    """Train, and return the record."""
    start = time.perf_counter()
    value, score, zeros = train(task, penalty, run.method, run.seed)
    return Record(
        **asdict(run), metric=task.metric, value=value, score=score, zeros=zeros, seconds=time.perf_counter() - start
    )


def perform_all(tasks: list[str], methods: list[str], seeds: int, folders: Folders, out: Path) -> None:
    loaded = {name: partial(perform, task=TASKS[name](folders), penalty=PENALTIES[name]) for name in tasks}
    for name in tasks:
        perform_missing(first_runs(name, methods), out, loaded[name])
    for name in tasks:
        perform_missing(further_runs(name, methods, seeds, out), out, loaded[name])


def all_runs(tasks: list[str], methods: list[str], seeds: int, out: Path) -> Iterator[Run]:
    for name in tasks:
        yield from first_runs(name, methods)
        yield from further_runs(name, methods, seeds, out)


@one_thread()
def main(arguments: list[str] | None = None) -> None:
    every = [*OWN, *CELLS, *PEERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(PENALTIES), default=list(PENALTIES))
    parser.add_argument("--methods", nargs="+", choices=every, default=every, metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fashion-mnist", type=Path, default=FASHION_FOLDER, help="folder with its idx files")
    parser.add_argument("--cifar10", type=Path, help="folder that it was fetched to; default: where proxmo puts it")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report the records that are there")
    parser.add_argument("--out", type=Path, default=Path("results/auto_network"))
    options = parser.parse_args(arguments)
    missing = missing_packages()
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}")
    methods = [name for name in options.methods if name not in PEERS or PEERS[name].package not in missing]
    if not options.report_only:
        folders = Folders(options.fashion_mnist, options.cifar10)
        perform_all(options.tasks, methods, options.seeds, folders, options.out)
    records = read_all(list(all_runs(options.tasks, methods, options.seeds, options.out)), options.out)
    if not records:
        raise SystemExit(f"no records in {options.out}")
    write(options.out, "auto_network", [asdict(record) for record in records], draw(records), COLUMNS, rows(records))


if __name__ == "__main__":
    main()
