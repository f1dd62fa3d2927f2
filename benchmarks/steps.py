"""Time of an optimizer step, as a multiple of torch's fused SGD with momentum, or of its fused AdamW."""

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
from proxmo import L1, GroupL2, GroupLInf, Penalty, ProxAdamW, ProxSGD
from proxmo.experiments.networks import ResNet18

Shapes = list[tuple[int, ...]]
PENALTIES: dict[str, Penalty | None] = {"none": None, "ℓ1": L1(1e-3), "ℓ2,1": GroupL2(1e-3), "ℓ∞,1": GroupLInf(1e-3)}
Methods = dict[str, tuple[Any, dict[str, Any]]]
METHODS: Methods = {
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
ADAM_METHODS: Methods = {
    "AdamW, fused": (optim.AdamW, {"fused": True}),
    "AdamW, foreach": (optim.AdamW, {"foreach": True}),
    **{
        f"{name}, {kind}": (ProxAdamW, {"penalty": penalty, "fused": kind == "fused"})
        for name, penalty in PENALTIES.items()
        for kind in ("default", "fused")
    },
    "ℓ2,1 by block, default": (ProxAdamW, {"penalty": PENALTIES["ℓ2,1"], "metric": "block"}),
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
    momentum = {"momentum": 0.9} if method in (optim.SGD, ProxSGD) else {}
    return method(params, **{"lr": 0.01, **momentum, **options})


def _candidates(methods: Methods, grads: list[Tensor], seed: int) -> dict[str, Callable[[], object]]:
    """Return the steps of new optimizers, which allocate their memory in random order."""
    order = random.Random(seed).sample(list(methods), len(methods))
    return {name: optimizer(grads, methods[name][0], **methods[name][1]).step for name in order}


def steps(folder: Path, repeats: int, models: dict[str, Callable[[], Shapes]] = MODELS) -> None:
    """Time steps of SGD with momentum and of ProxSGD on one and two threads."""
    _measure(folder, repeats, models, METHODS, "steps", "SGD, fused")


def adam_steps(folder: Path, repeats: int, models: dict[str, Callable[[], Shapes]] = MODELS) -> None:
    """Time steps of AdamW and of ProxAdamW on one and two threads."""
    _measure(folder, repeats, models, ADAM_METHODS, "adam_steps", "AdamW, fused")


def _measure(
    folder: Path, repeats: int, models: dict[str, Callable[[], Shapes]], methods: Methods, name: str, baseline: str
) -> None:
    rows: list[tuple[str, ...]] = []
    numbers: dict[str, Any] = {}
    for model, shapes in models.items():
        grads = gradients(shapes())
        _warm_up(methods)
        for count in (1, 2):
            with threads(count):
                rounds = [
                    by_turns(_candidates(methods, grads, seed), repeats, max_seconds=2.0) for seed in range(ROUNDS)
                ]
            seconds = {method: statistics.median(found[method] for found in rounds) for method in methods}
            # ratios within each round, since memory speed changes between rounds
            ratios = {
                method: statistics.median(found[method] / found[baseline] for found in rounds) for method in methods
            }
            numbers[f"{model}, threads: {count}"] = {"seconds": seconds, "ratios": ratios}
        one, two = (numbers[f"{model}, threads: {count}"]["ratios"] for count in (1, 2))
        rows += [(model, method, f"{one[method]:.2f}", f"{two[method]:.2f}") for method in methods]
    figure = Figure(figsize=(10, 3.5 * len(models) + 0.5), layout="constrained")
    for axes, (title, found) in zip(figure.subplots(len(models), 2).flat, numbers.items(), strict=True):
        bars(axes, found["ratios"], f"{title}\nstep time / torch's {baseline}", ", fused", EAGER)
    write(folder, name, numbers, figure, ("model", "optimizer", "1 thread", "2 threads"), rows)


def _warm_up(methods: Methods) -> None:
    """Compile the loops of all methods, which takes seconds, before anything is timed."""
    for step in _candidates(methods, gradients([(2, 3)]), 0).values():
        step()
