"""How time scales: of the ℓ∞,1 prox with rows and columns, of a step with tensors, and of both with threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, optim

from benchmarks.kernels import KERNELS
from benchmarks.output import BLUE, GREY, ORANGE, write
from benchmarks.steps import gradients, optimizer, resnet18
from benchmarks.timing import by_turns, threads
from proxmo import L1, GroupLInf, ProxSGD

Calls = dict[str, Callable[[], object]]
COLOURS = {
    "fused": ORANGE,
    "eager": BLUE,
    "sort + cumsum": GREY,
    "ℓ1, fused": ORANGE,
    "ℓ1, default": BLUE,
    "SGD, foreach": GREY,
    "SGD, fused": "black",
    "step, ℓ1, fused": ORANGE,
    "step, SGD, fused": "black",
    "prox of ℓ∞,1, fused": BLUE,
}


def _prox_calls(rows: int, columns: int) -> Calls:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    threshold = 0.08 * columns
    penalty = GroupLInf(threshold)
    return {
        "fused": lambda: penalty.prox(x, 1.0, fused=True),
        "eager": lambda: penalty.prox(x, 1.0),
        "sort + cumsum": lambda: KERNELS["ℓ∞,1"].textbook(x, threshold),
    }


def _step_calls(grads: list[Tensor]) -> Calls:
    return {
        "SGD, fused": optimizer(grads, optim.SGD, fused=True).step,
        "SGD, foreach": optimizer(grads, optim.SGD, foreach=True).step,
        "ℓ1, default": optimizer(grads, ProxSGD, penalty=L1(1e-3)).step,
        "ℓ1, fused": optimizer(grads, ProxSGD, penalty=L1(1e-3), fused=True).step,
    }


def _thread_calls() -> Calls:
    grads = gradients(resnet18())
    x = torch.randn(512, 4608, generator=torch.Generator().manual_seed(0))
    return {
        "step, SGD, fused": optimizer(grads, optim.SGD, fused=True).step,
        "step, ℓ1, fused": optimizer(grads, ProxSGD, penalty=L1(1e-3), fused=True).step,
        "prox of ℓ∞,1, fused": lambda: GroupLInf(400.0).prox(x, 1.0, fused=True),
    }


def curves(folder: Path, repeats: int, largest: int = 1 << 20) -> None:
    """Time all sizes up to ``largest`` elements on one thread, then all thread counts."""
    sizes = [size for size in (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536) if 64 * size <= largest]
    numbers: dict[str, dict[int, dict[str, float]]] = {}
    with threads(1):
        numbers["rows of 256"] = {n: by_turns(_prox_calls(n, 256), repeats) for n in sizes if 256 * n <= largest}
        numbers["columns of 64 rows"] = {n: by_turns(_prox_calls(64, n), repeats) for n in sizes}
        numbers["tensors of 100"] = {
            n: by_turns(_step_calls(gradients([(10, 10)] * n)), repeats) for n in sizes if 100 * n <= largest
        }
    numbers["threads"] = {}
    calls = _thread_calls()
    for count in range(1, (os.cpu_count() or 1) + 1):
        with threads(count):
            numbers["threads"][count] = by_turns(calls, repeats)
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (varied, found) in zip(figure.subplots(2, 2).flat, numbers.items(), strict=True):
        for name in next(iter(found.values())):
            milliseconds = [1e3 * seconds[name] for seconds in found.values()]
            axes.plot(list(found), milliseconds, "o-", color=COLOURS[name], label=name)
        axes.set_yscale("log")
        axes.set_xlabel(varied)
        axes.set_ylabel("milliseconds")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if varied == "threads":
            axes.set_xticks(list(found))
        else:
            axes.set_xscale("log")
    rows = [
        (varied, str(size), name, f"{1e3 * value:.3g}")
        for varied, found in numbers.items()
        for size, seconds in found.items()
        for name, value in seconds.items()
    ]
    write(folder, "curves", numbers, figure, ("varied", "number", "candidate", "milliseconds"), rows)
