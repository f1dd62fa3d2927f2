"""Measure size, accuracy and speed of compacted networks: `python -m benchmarks.autosize`.

A network with two hidden layers and a ResNet-18 of width 8 are trained with ℓ∞,1 and ℓ2,1 on whole units for a range of
strengths, and compacted. The methods are prox with momentum, prox without momentum (vanilla), and the usual baseline
without a prox: momentum SGD on loss plus penalty, by its subgradient, after which the units with the smallest norms are
pruned until every layer is as narrow as with the first method. The lr of each method is tuned at the middle strength by
the training objective. Dense and compacted networks are timed alternately on one thread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.output import write
from proxmo import GroupL2, GroupLInf, ProxSGD, compact, unit_groups
from proxmo.experiments.data import load
from proxmo.experiments.images import Batches, Images, plain_batches
from proxmo.experiments.networks import ResNet18
from proxmo.experiments.threads import one_thread
from proxmo.optim.units import joined, seen_by_penalty, write_back

Method = Literal["momentum", "vanilla", "subgradient"]
METHODS: tuple[Method, ...] = ("momentum", "vanilla", "subgradient")
COLOURS = {"momentum": "#D55E00", "vanilla": "#0072B2", "subgradient": "#009E73"}
LABELS = {"momentum": "prox, momentum", "vanilla": "prox, vanilla", "subgradient": "subgradient, then pruned"}
PENALTIES = {"ℓ2,1": GroupL2, "ℓ∞,1": GroupLInf}
RATES = (1.0, 0.3, 0.1)
ROUNDS = 30  # timings of each network


@dataclass(frozen=True)
class Problem:
    """A network, its data and its training settings."""

    name: str
    images: Images
    make: Callable[[], nn.Module]
    batch: int
    epochs: int
    strengths: dict[str, tuple[float, ...]]


@dataclass
class Result:
    """Measurements of one trained and compacted network."""

    problem: str
    penalty: str
    method: Method
    strength: float
    lr: float
    seed: int
    objective: float
    """F on the training images, before pruning."""
    dense_accuracy: float
    accuracy: float
    """Test accuracy after compaction."""
    parameters: tuple[int, int]
    multiply_adds: tuple[int, int]
    speed_up: float


@dataclass
class Trained:
    """A trained network, and the optimizer that knows its units."""

    network: nn.Module
    optimizer: ProxSGD
    objective: float


def train(problem: Problem, penalty_name: str, method: Method, strength: float, lr: float, seed: int) -> Trained:
    """Train a network with one of the three methods."""
    torch.manual_seed(seed)
    network = problem.make()
    penalty = PENALTIES[penalty_name](strength)
    example = next(plain_batches(problem.images, problem.images.test, 2))[0]
    optimizer = ProxSGD(unit_groups(network, example, penalty, balance=False), lr, 0.0 if method == "vanilla" else 0.9)
    group = optimizer.param_groups[0]
    if method == "subgradient":
        group["penalty"] = None
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [problem.epochs * 2 // 3], gamma=0.1)
    batches = Batches(problem.images, problem.batch, torch.Generator().manual_seed(seed))
    loss_sum = 0.0
    for _ in range(problem.epochs):
        loss_sum = 0.0
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(network(inputs), labels)
            loss_sum += loss.item()
            if method == "subgradient":
                loss = loss + sum(penalty.value(x) for x in seen_by_penalty(group["units"], group["params"]))
            loss.backward()
            optimizer.step()
        scheduler.step()
    group["penalty"] = penalty
    return Trained(network.eval(), optimizer, loss_sum / len(batches) + float(optimizer.penalty_value()))


@torch.no_grad()
def widths(optimizer: ProxSGD) -> list[int]:
    """Return the number of nonzero units of each family, at least 1."""
    group = optimizer.param_groups[0]
    return [max(1, int(matrix.any(1).sum())) for matrix in seen_by_penalty(group["units"], group["params"])]


@torch.no_grad()
def prune(optimizer: ProxSGD, keep: list[int]) -> None:
    """Zero all units of each family but the ``keep`` with the largest norms."""
    group = optimizer.param_groups[0]
    for family, count in zip(group["units"], keep, strict=True):
        matrix = joined(family, group["params"])
        matrix[matrix.norm(dim=1).argsort(descending=True)[count:]] = 0
        write_back(family, matrix, group["params"])


@torch.no_grad()
def accuracy(network: nn.Module, images: Images) -> float:
    right = sum(int((network(x).argmax(1) == y).sum()) for x, y in plain_batches(images, images.test, 1000))
    return right / len(images.test)


@torch.no_grad()
def speed_up(dense: nn.Module, small: nn.Module, inputs: Tensor) -> float:
    """Return the ratio of the median times, measured alternately."""
    times: dict[nn.Module, list[float]] = {dense: [], small: []}
    for _ in range(ROUNDS):
        for network, seconds in times.items():
            start = time.perf_counter()
            network(inputs)
            seconds.append(time.perf_counter() - start)
    return statistics.median(times[dense]) / statistics.median(times[small])


def compare(problem: Problem, penalty: str, seeds: int, advance: Callable[[], None]) -> list[Result]:
    """Train and compact with all methods, strengths and seeds for one problem and penalty."""
    strengths = problem.strengths[penalty]
    inputs = next(plain_batches(problem.images, problem.images.test, 256))[0]
    rates: dict[Method, float] = {}
    for method in METHODS:
        objectives = {}
        for lr in RATES:
            objectives[lr] = train(problem, penalty, method, strengths[len(strengths) // 2], lr, seed=1000).objective
            advance()
        rates[method] = min(RATES, key=objectives.__getitem__)
    results = []
    for strength in strengths:
        for seed in range(seeds):
            keep: list[int] = []
            for method in METHODS:
                run = train(problem, penalty, method, strength, rates[method], seed)
                dense_accuracy = accuracy(run.network, problem.images)
                if method == "momentum":
                    keep = widths(run.optimizer)
                elif method == "subgradient":
                    prune(run.optimizer, keep)
                small, report = compact(run.network, inputs[:2])
                results.append(
                    Result(
                        problem.name,
                        penalty,
                        method,
                        strength,
                        rates[method],
                        seed,
                        run.objective,
                        dense_accuracy,
                        accuracy(small, problem.images),
                        report.parameters,
                        report.multiply_adds,
                        speed_up(run.network, small, inputs),
                    )
                )
                advance()
    return results


def two_hidden_layers(pixels: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def problems(fashion: Path | None) -> list[Problem]:
    digits = load("digits")
    found = [
        Problem(
            "two layers, digits",
            digits,
            lambda: two_hidden_layers(64),
            batch=64,
            epochs=60,
            strengths={"ℓ2,1": (0.001, 0.003, 0.006, 0.01, 0.02), "ℓ∞,1": (0.01, 0.03, 0.06, 0.1, 0.15)},
        ),
        Problem(
            "ResNet, digits",
            digits,
            lambda: ResNet18(8, 1, 10),
            batch=64,
            epochs=40,
            strengths={"ℓ2,1": (0.01, 0.03, 0.06), "ℓ∞,1": (0.1, 0.2, 0.4)},
        ),
    ]
    if fashion is not None:
        images = load("fashion-mnist", fashion)
        pixels = images.train.images[0].numel()
        strengths = {"ℓ2,1": (0.001, 0.003, 0.006, 0.01), "ℓ∞,1": (0.01, 0.03, 0.06, 0.1)}
        found.append(Problem("two layers, Fashion-MNIST", images, lambda: two_hidden_layers(pixels), 512, 6, strengths))
    return found


def means(results: list[Result]) -> list[dict[str, object]]:
    """Average each setting over its seeds."""
    by_setting: dict[tuple[str, str, str, float], list[Result]] = {}
    for result in results:
        by_setting.setdefault((result.problem, result.penalty, result.method, result.strength), []).append(result)
    return [
        {
            "problem": problem,
            "penalty": penalty,
            "method": method,
            "strength": strength,
            "lr": runs[0].lr,
            "objective": statistics.mean(r.objective for r in runs),
            "converged": all(math.isfinite(r.objective) for r in runs),
            "dense accuracy": statistics.mean(r.dense_accuracy for r in runs),
            "accuracy": statistics.mean(r.accuracy for r in runs),
            "dense parameters": runs[0].parameters[0],
            "parameters": statistics.mean(r.parameters[1] for r in runs),
            "multiply-adds": statistics.mean(r.multiply_adds[0] / r.multiply_adds[1] for r in runs),
            "speed-up": statistics.geometric_mean(r.speed_up for r in runs),
        }
        for (problem, penalty, method, strength), runs in by_setting.items()
    ]


COLUMNS = (
    "problem",
    "penalty",
    "strength",
    "method",
    "lr",
    "F",
    "accuracy",
    "parameters",
    "smaller",
    "fewer multiply-adds",
    "faster",
)


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    return [
        (
            str(mean["problem"]),
            str(mean["penalty"]),
            f"{mean['strength']:g}",
            LABELS[str(mean["method"])],
            f"{mean['lr']:g}",
            f"{mean['objective']:.3f}" if mean["converged"] else "diverged",
            f"{mean['accuracy']:.1%}",
            f"{mean['parameters']:,.0f}",
            f"{mean['dense parameters'] / mean['parameters']:.1f}×",  # type: ignore[operator]
            f"{mean['multiply-adds']:.1f}×",
            f"{mean['speed-up']:.1f}×",
        )
        for mean in means(results)
    ]


def draw(results: list[Result]) -> Figure:
    """Plot accuracy against size and against measured speed, one row of panels per problem and penalty."""
    pairs = list(dict.fromkeys((result.problem, result.penalty) for result in results))
    figure = Figure(figsize=(10, 3.1 * len(pairs)), layout="constrained")
    panels = figure.subplots(len(pairs), 2, squeeze=False)
    for (problem, penalty), (by_size, by_speed) in zip(pairs, panels, strict=True):
        for method in METHODS:
            wanted = (problem, penalty, method)
            chosen = [m for m in means(results) if (m["problem"], m["penalty"], m["method"]) == wanted]
            chosen = [m for m in chosen if m["converged"]]
            accuracies = [100 * m["accuracy"] for m in chosen]  # type: ignore[operator]
            style = {"marker": "o", "color": COLOURS[method], "label": LABELS[method]}
            by_size.plot([m["parameters"] for m in chosen], accuracies, **style)
            by_speed.plot([m["speed-up"] for m in chosen], accuracies, **style)
        by_size.set(xscale="log", xlabel="parameters after compaction")
        by_size.xaxis.set_minor_formatter(NullFormatter())
        by_speed.set(xlabel="speed-up over the dense network")
        for axes in (by_size, by_speed):
            axes.set(ylabel="test accuracy (%)", title=f"{problem}, {penalty}")
            axes.grid(alpha=0.3, which="both")
    panels[0][0].legend()
    return figure


@one_thread()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fashion-mnist", type=Path, help="folder with its files; adds this data set")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/autosize"))
    options = parser.parse_args(arguments)
    jobs = [(problem, penalty) for problem in problems(options.fashion_mnist) for penalty in PENALTIES]
    runs = [len(METHODS) * (len(RATES) + len(p.strengths[penalty]) * options.seeds) for p, penalty in jobs]
    results = []
    with Progress() as progress:
        task = progress.add_task("training runs", total=sum(runs))
        for problem, penalty in jobs:
            results += compare(problem, penalty, options.seeds, lambda: progress.advance(task))
    write(options.out, "autosize", [asdict(result) for result in results], draw(results), COLUMNS, rows(results))


if __name__ == "__main__":
    main()
