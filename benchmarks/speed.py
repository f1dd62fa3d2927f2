"""How fast steps and kernels are: `python -m benchmarks`.

Steps are compared with torch's fused SGD with momentum, kernels with a copy of the matrix in memory, which nothing can
be faster than. All candidates run by turns; every result is checked before it is timed. Peers that are not installed
are left out, and named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn, optim

from benchmarks import peers
from benchmarks.output import write
from benchmarks.timing import by_turns, threads
from proxmo import L1, GroupL2, GroupLInf, Penalty, ProxSGD
from proxmo.experiments.networks import ResNet18

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "ResNet-18, 11M": lambda: [tuple(p.shape) for p in ResNet18(64, 3, 10).parameters()],
    "GPT-2 small, 124M": lambda: [(50257, 768), (1024, 768), *12 * _block(768), (768,), (768,)],
    "1000 tensors of 100": lambda: [(10, 10)] * 1000,
}
PENALTIES: dict[str, Penalty | None] = {"none": None, "ℓ1": L1(1e-3), "ℓ2,1": GroupL2(1e-3), "ℓ∞,1": GroupLInf(1e-3)}
MATRICES = [(512, 4608), (64, 576), (50257, 768), (1000, 10), (8, 100_000)]
# of the mean sum of a row of normal numbers: few elements are cut, many, and most rows vanish
THRESHOLDS = {"small": 1e-3, "middling": 0.1, "large": 1.02}


def _block(width: int) -> list[tuple[int, ...]]:
    """The shapes of a block of a transformer."""
    linear = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [(width,)] * 4 + [shape for weight in linear for shape in (weight, weight[:1])]


def steps(folder: Path, repeats: int, models: list[str]) -> None:
    """Time steps of optimizers, at one and two threads."""
    rows: list[tuple[str, ...]] = []
    numbers: dict[str, Any] = {}
    for model in models:
        for count in (1, 2):
            candidates: dict[str, Callable[[], object]] = {
                "SGD, fused": _optimizer(MODELS[model](), optim.SGD, fused=True).step,
                "SGD, foreach": _optimizer(MODELS[model](), optim.SGD, foreach=True).step,
            }
            for name, penalty in PENALTIES.items():
                for fused in (False, True):
                    made = _optimizer(MODELS[model](), ProxSGD, penalty=penalty, fused=fused)
                    candidates[f"{name}, {'fused' if fused else 'default'}"] = made.step
            with threads(count):
                seconds = by_turns(candidates, repeats)
            ratios = {name: value / seconds["SGD, fused"] for name, value in seconds.items()}
            numbers[f"{model}, threads: {count}"] = {"seconds": seconds, "ratios": ratios}
            rows += [(model, str(count), name, f"{ratio:.2f}") for name, ratio in ratios.items()]
    first = next(iter(numbers.values()))["ratios"]
    figure = Figure(figsize=(9, 3 * len(numbers) / 2 + 1), layout="constrained")
    for axes, (title, found) in zip(figure.subplots(-(-len(numbers) // 2), 2).flat, numbers.items(), strict=False):
        _bars(axes, found["ratios"], f"{title}\ntime of a step / torch's fused SGD", list(first))
    write(folder, "steps", numbers, figure, ("model", "threads", "optimizer", "ratio"), rows)


def _optimizer(shapes: list[tuple[int, ...]], method: Any, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return method(params, lr=0.01, momentum=0.9, **options)


def kernels(folder: Path, repeats: int, matrices: list[tuple[int, int]]) -> None:
    """Time the prox of ℓ∞,1 by rows, at one and two threads."""
    console = Console()
    candidates: dict[str, peers.RowProx] = {
        "proxmo, fused": lambda x, t: GroupLInf(t).prox(x, 1.0, fused=True),
        "proxmo, plain": lambda x, t: GroupLInf(t).prox(x, 1.0),
        "sort + cumsum": peers.by_sorting,
    }
    for name, found in peers.installed():
        if isinstance(found, str):
            console.print(f"without {name}: {found}", soft_wrap=True)
        else:
            candidates[name] = found
    rows: list[tuple[str, ...]] = []
    numbers: dict[str, Any] = {}
    for shape in matrices:
        for kind, share in THRESHOLDS.items():
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            threshold = share * 0.798 * shape[1]
            right = {name: call for name, call in candidates.items() if _is_right(name, call, x, threshold, console)}
            calls: dict[str, Callable[[], object]] = {"copy": x.clone}
            calls |= {name: _bound(call, x, threshold) for name, call in right.items()}
            for count in (1, 2):
                with threads(count):
                    seconds = by_turns(calls, repeats)
                ratios = {name: value / seconds["copy"] for name, value in seconds.items()}
                title = f"{shape[0]} x {shape[1]}, {kind} threshold, threads: {count}"
                numbers[title] = {"seconds": seconds, "ratios": ratios}
                for name, ratio in ratios.items():
                    gain = seconds["sort + cumsum"] / seconds[name]
                    rows.append((f"{shape[0]} x {shape[1]}", kind, str(count), name, f"{ratio:.1f}", f"{gain:.1f}"))
    figure = Figure(figsize=(9, 2.2 * len(matrices) + 1), layout="constrained")
    panels = figure.subplots(len(matrices), 2, squeeze=False)
    for line, shape in zip(panels, matrices, strict=True):
        for axes, count in zip(line, (1, 2), strict=True):
            title = f"{shape[0]} x {shape[1]}, middling threshold, threads: {count}"
            _bars(axes, numbers[title]["ratios"], f"{title}\ntime / a copy in memory", list(calls))
            axes.set_xscale("log")
    columns = ("matrix", "threshold", "threads", "prox of ℓ∞,1", "time / copy", "times faster than sorting")
    write(folder, "kernels", numbers, figure, columns, rows)


def _bound(call: peers.RowProx, x: Tensor, threshold: float) -> Callable[[], object]:
    return lambda: call(x, threshold)


def _is_right(name: str, call: peers.RowProx, x: Tensor, threshold: float, console: Console) -> bool:
    """Whether it gives what sorting in float64 gives, on the first rows."""
    few = x[:64].contiguous()
    error = (call(few, threshold).double() - peers.by_sorting(few.double(), threshold)).abs().max().item()
    if error > 1e-5:
        console.print(f"without {name} on {tuple(x.shape)}: it is off by {error:.1e}")
    return error <= 1e-5


def _bars(axes: Any, ratios: dict[str, float], title: str, names: list[str]) -> None:
    shown = [name for name in names if name in ratios]
    colours = [ORANGE if "fused" in name and "SGD" not in name else GREY if "SGD" in name else BLUE for name in shown]
    bars = axes.barh(shown, [ratios[name] for name in shown], color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
