"""What the optimizer costs in training: ResNet-18 for CIFAR-10, ℓ∞,1 on the channels of every layer, batch 256.

The passes forward and backward are the same with every optimizer, and take hundreds of times as long: they vary by more
from one to the next than optimizers cost. So each is charged the median over all of them, and its own time on top.
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
SECONDS = 100.0  # of training with each optimizer


class Training:
    """A network, its optimizer and a batch; a call takes one step of training."""

    def __init__(self, make_optimizer: Callable[[nn.Module], optim.Optimizer], width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.network = ResNet18(width, 3, 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.inputs = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch,))
        self.optimizer = make_optimizer(self.network)
        self.in_passes: list[float] = []
        self.in_optimizer: list[float] = []

    def __call__(self) -> None:
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        functional.cross_entropy(self.network(self.inputs), self.labels).backward()
        between = time.perf_counter()
        self.optimizer.step()
        self.in_passes.append(between - begin)
        self.in_optimizer.append(time.perf_counter() - between)


def _prox_sgd(fused: bool) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda network: ProxSGD(param_groups(network, GroupLInf(0.1)), lr=0.1, momentum=0.9, fused=fused)


def training(folder: Path, repeats: int, width: int = WIDTH, batch: int = BATCH) -> None:
    """Time whole steps of training, at one and two threads."""
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
            by_turns(runs, repeats, most=SECONDS)
        in_passes = {name: run.in_passes[1:] for name, run in runs.items()}  # the first also takes memory and compiles
        steps = {name: median(run.in_optimizer[1:]) for name, run in runs.items()}
        passes = median([each for taken in in_passes.values() for each in taken])
        seconds = {name: passes + step for name, step in steps.items()}
        found = {}
        for name, step in steps.items():
            found[name] = {
                "passes": in_passes[name],
                "optimizer": step,
                "images per second": batch / seconds[name],
                "to SGD": seconds["SGD, fused"] / seconds[name],
                "share of the optimizer": 1 - passes / seconds[name],
            }
            speed, share = found[name]["to SGD"], found[name]["share of the optimizer"]
            own = f"{median(in_passes[name]):.2f} s"
            rows.append((str(count), name, own, f"{1000 * step:.1f} ms", f"{100 * share:.2f} %", f"{speed:.3f}"))
        numbers[f"threads: {count}"] = found
        shares = {name: 100 * values["share of the optimizer"] for name, values in found.items()}
        bars(axes, shares, f"threads: {count}\nshare of the optimizer in a step of training, %", ", fused", ", default")
    columns = ("threads", "optimizer", "both passes", "its step", "share of the step", "images per second / SGD's")
    write(folder, "training", numbers, figure, columns, rows)
