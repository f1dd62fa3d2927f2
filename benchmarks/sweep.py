"""Speed-up of the synthetic grid batched in one tensor over one Python loop per run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn import Parameter

from benchmarks.output import bars, write
from benchmarks.timing import by_turns, threads
from proxmo import ProxSGD, SquaredL2
from proxmo.experiments import synthetic

SEEDS = 50
SAMPLE = 200  # timed iterations of a loop; all iterations cost the same


def _optimizer_loop() -> None:
    """Run ``SAMPLE`` iterations in the cell M = 10, γ = 0.1 at σ = 5."""
    x = Parameter(torch.full((synthetic.DIMENSION,), synthetic.START, dtype=torch.float64))
    optimizer = ProxSGD([x], lr=0.1, momentum=0.9, penalty=SquaredL2(synthetic.PAPER.curvature))
    generator = torch.Generator().manual_seed(0)
    for _ in range(SAMPLE):
        noise = torch.randn(synthetic.DIMENSION, generator=generator, dtype=torch.float64)
        x.grad = x.detach() + noise * (5 / math.sqrt(synthetic.DIMENSION))
        optimizer.step()
        synthetic.PAPER.error(x.detach())


def _tensor_loop() -> None:
    """Run the same iterations with the update written out by hand."""
    x = torch.full((synthetic.DIMENSION,), synthetic.START, dtype=torch.float64)
    average = torch.zeros_like(x)
    generator = torch.Generator().manual_seed(0)
    shrinkage = 1 + 0.1 * synthetic.PAPER.curvature
    for k in range(SAMPLE):
        noise = torch.randn(synthetic.DIMENSION, generator=generator, dtype=torch.float64)
        gradient = x + noise * (5 / math.sqrt(synthetic.DIMENSION))
        average = gradient if k == 0 else average + 0.1 * (gradient - average)
        x = (x - 0.1 * average) / shrinkage
        synthetic.PAPER.error(x)


def sweep(folder: Path, repeats: int, iterations: int = synthetic.ITERATIONS) -> None:
    """Time the whole grid once, and some iterations of single runs in turns."""
    loops: dict[str, Callable[[], object]] = {
        "ProxSGD loop per run": _optimizer_loop,
        "tensor loop per run": _tensor_loop,
    }
    with threads(1):
        start = time.perf_counter()
        found = synthetic.run(SEEDS, iterations)
        whole = time.perf_counter() - start
        seconds = by_turns(loops, repeats)
    runs = len(synthetic.grid(synthetic.PAPER, iterations)) * len(synthetic.SIGMAS) * SEEDS
    gains = {name: value / SAMPLE * iterations * runs / whole for name, value in seconds.items()}
    numbers: dict[str, Any] = {"seconds of the grid": whole, "runs": runs, "cells": len(found.cells), "gains": gains}
    figure = Figure(figsize=(8, 1.8), layout="constrained")
    title = f"{runs} runs of {iterations} steps: time / one tensor"
    bars(figure.subplots(), {"one tensor": 1.0, **gains}, title, "one tensor", "per run")
    rows = [("one tensor", f"{whole:.1f} s", "1")]
    rows += [(name, f"{gain * whole:.0f} s", f"{gain:.0f}") for name, gain in gains.items()]
    write(folder, "sweep", numbers, figure, ("synthetic grid", "time", "ratio"), rows)
