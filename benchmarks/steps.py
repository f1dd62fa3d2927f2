"""Time of an optimizer step, as a multiple of torch's fused SGD with momentum."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn, optim

from benchmarks.output import bars, write
from benchmarks.timing import by_turns, threads
from proxmo import L1, GroupL2, GroupLInf, Penalty, ProxSGD
from proxmo.experiments.networks import ResNet18

Shapes = list[tuple[int, ...]]
PENALTIES: dict[str, Penalty | None] = {"none": None, "ℓ1": L1(1e-3), "ℓ2,1": GroupL2(1e-3), "ℓ∞,1": GroupLInf(1e-3)}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD, fused": (optim.SGD, {"fused": True}),
    "SGD, foreach": (optim.SGD, {"foreach": True}),
    **{
        f"{name}, {kind}": (ProxSGD, {"penalty": penalty, "fused": kind == "fused"})
        for name, penalty in PENALTIES.items()
        for kind in ("default", "fused")
    },
    "ℓ1, tensor lr": (ProxSGD, {"penalty": PENALTIES["ℓ1"], "fused": False, "lr": torch.tensor(0.01)}),
    "ℓ1, nonfinite skip": (ProxSGD, {"penalty": PENALTIES["ℓ1"], "fused": False, "nonfinite": "skip"}),
}
EAGER = (", default", ", tensor lr", ", nonfinite skip")
ROUNDS = 7  # each with new optimizers: the placement of their memory changes short steps by 10%


def resnet18() -> Shapes:
    """Return the shapes of a ResNet-18 for CIFAR-10: 62 tensors, 11 million parameters."""
    return [tuple(p.shape) for p in ResNet18(64, 3, 10).parameters()]


def gpt2_small() -> Shapes:
    """Return the shapes of GPT-2 small: 148 tensors, 124 million parameters."""
    width = 768
    linear = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    block = [(width,)] * 4 + [shape for weight in linear for shape in (weight, weight[:1])]
    return [(50257, width), (1024, width), *12 * block, (width,), (width,)]


MODELS: dict[str, Callable[[], Shapes]] = {
    "ResNet-18, 11M": resnet18,
    "GPT-2 small, 124M": gpt2_small,
    "1000 tensors of 100": lambda: [(10, 10)] * 1000,
    "200 tensors of 16 x 16": lambda: [(16, 16)] * 200,
}


def gradients(shapes: Shapes) -> list[Tensor]:
    """Return normally distributed tensors of these shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def optimizer(grads: list[Tensor], method: Any, **options: Any) -> Any:
    """Return an optimizer of new parameters with these gradients; ``lr`` and ``momentum`` are options too."""
    params = [nn.Parameter(gradient.clone()) for gradient in grads]
    for p, gradient in zip(params, grads, strict=True):
        p.grad = gradient
    return method(params, **{"lr": 0.01, "momentum": 0.9, **options})


def _candidates(grads: list[Tensor], seed: int) -> dict[str, Callable[[], object]]:
    """Return the steps of new optimizers, which allocate their memory in random order."""
    order = random.Random(seed).sample(list(METHODS), len(METHODS))
    return {name: optimizer(grads, METHODS[name][0], **METHODS[name][1]).step for name in order}


def steps(folder: Path, repeats: int, models: dict[str, Callable[[], Shapes]] = MODELS) -> None:
    """Time optimizer steps on one and two threads."""
    rows: list[tuple[str, ...]] = []
    numbers: dict[str, Any] = {}
    for model, shapes in models.items():
        grads = gradients(shapes())
        for count in (1, 2):
            with threads(count):
                rounds = [by_turns(_candidates(grads, seed), repeats, max_seconds=2.0) for seed in range(ROUNDS)]
            seconds = {name: statistics.median(found[name] for found in rounds) for name in METHODS}
            # ratios within each round, since memory speed changes between rounds
            ratios = {
                name: statistics.median(found[name] / found["SGD, fused"] for found in rounds) for name in METHODS
            }
            numbers[f"{model}, threads: {count}"] = {"seconds": seconds, "ratios": ratios}
        one, two = (numbers[f"{model}, threads: {count}"]["ratios"] for count in (1, 2))
        rows += [(model, name, f"{one[name]:.2f}", f"{two[name]:.2f}") for name in METHODS]
    figure = Figure(figsize=(10, 3.5 * len(models) + 0.5), layout="constrained")
    for axes, (title, found) in zip(figure.subplots(len(models), 2).flat, numbers.items(), strict=True):
        bars(axes, found["ratios"], f"{title}\nstep time / torch's fused SGD", ", fused", EAGER)
    write(folder, "steps", numbers, figure, ("model", "optimizer", "1 thread", "2 threads"), rows)
