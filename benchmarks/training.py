"""Cost of the optimizer in training: ResNet-18 for CIFAR-10, ℓ∞,1 on the channels of every layer, batch 256.

The forward and backward passes are the same for every optimizer and take hundreds of times as long as its step. They
vary more than optimizers differ, so each optimizer is charged the median pass of all runs plus its own step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn, optim
from torch.nn import functional

from benchmarks.output import bars, write
from benchmarks.timing import by_turns, threads
from proxmo import GroupLInf, ProxSGD, param_groups
from proxmo.experiments.networks import ResNet18

BATCH = 256
WIDTH = 64
SECONDS = 100.0  # of training per optimizer


class Training:
    """A network, its optimizer and a batch; a call runs one training step."""

    def __init__(self, make_optimizer: Callable[[nn.Module], optim.Optimizer], width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.network = ResNet18(width, 3, 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.inputs = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch,))
        self.optimizer = make_optimizer(self.network)
        self.pass_seconds: list[float] = []
        self.step_seconds: list[float] = []

    def __call__(self) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        functional.cross_entropy(self.network(self.inputs), self.labels).backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.pass_seconds.append(middle - start)
        self.step_seconds.append(time.perf_counter() - middle)


def _prox_sgd(fused: bool) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda network: ProxSGD(param_groups(network, GroupLInf(0.1)), lr=0.1, momentum=0.9, fused=fused)


def training(folder: Path, repeats: int, width: int = WIDTH, batch: int = BATCH) -> None:
    """Time whole training steps on one and two threads."""
    rows: list[tuple[str, ...]] = []
    numbers: dict[str, Any] = {}
    figure = Figure(figsize=(10, 2.2), layout="constrained")
    for axes, count in zip(figure.subplots(1, 2), (1, 2), strict=True):
        runs = {
            "SGD, fused": Training(
                lambda network: optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True), width, batch
            ),
            "ℓ∞,1, default": Training(_prox_sgd(False), width, batch),
            "ℓ∞,1, fused": Training(_prox_sgd(True), width, batch),
        }
        with threads(count):
            by_turns(runs, repeats, max_seconds=SECONDS)
        pass_seconds = {name: run.pass_seconds[1:] for name, run in runs.items()}  # the first compiles
        steps = {name: median(run.step_seconds[1:]) for name, run in runs.items()}
        passes = median([each for taken in pass_seconds.values() for each in taken])
        seconds = {name: passes + step for name, step in steps.items()}
        found = {}
        for name, step in steps.items():
            found[name] = {
                "passes": pass_seconds[name],
                "optimizer": step,
                "images per second": batch / seconds[name],
                "images per second / SGD": seconds["SGD, fused"] / seconds[name],
                "optimizer share": 1 - passes / seconds[name],
            }
            speed, share = found[name]["images per second / SGD"], found[name]["optimizer share"]
            own = f"{median(pass_seconds[name]):.2f} s"
            rows.append((str(count), name, own, f"{1000 * step:.1f} ms", f"{100 * share:.2f} %", f"{speed:.3f}"))
        numbers[f"threads: {count}"] = found
        shares = {name: 100 * values["optimizer share"] for name, values in found.items()}
        bars(axes, shares, f"threads: {count}\noptimizer share of a training step, %", ", fused", ", default")
    columns = ("threads", "optimizer", "both passes", "step", "share of training", "images per second / SGD")
    write(folder, "training", numbers, figure, columns, rows)
