"""Time of the prox of a matrix, as a multiple of a copy into preallocated memory, which is a lower bound.

The textbook implementation in torch and installed peer libraries are timed too. Every candidate is checked first; a
peer that is wrong is skipped, and the reason is printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from benchmarks import peers
from benchmarks.output import bars, write
from benchmarks.peers import MatrixProx
from benchmarks.timing import by_turns, threads
from proxmo import L1, GroupL2, GroupLInf, L1Ball, Nuclear, Penalty, Simplex

MATRICES = [(512, 4608), (64, 576), (50257, 768), (1000, 10), (8, 100_000)]
TOO_LARGE = 10_000_000  # elements; the peers in HUNGRY would need 20 GB
HUNGRY = {("ℓ∞,1", "proxop"), ("ℓ1 ball", "proxop")}
FUSED, EAGER = "proxmo, fused", "proxmo, eager"


def sorted_level(y: Tensor, radius: float) -> Tensor:
    """Return for each row the τ with Σ max(y − τ, 0) = radius, by sorting and cumulative sums."""
    descending = y.sort(dim=1, descending=True).values
    levels = (descending.cumsum(1) - radius) / torch.arange(1, y.shape[1] + 1, dtype=y.dtype)
    active = (descending > levels).sum(1, keepdim=True).clamp(min=1)
    return levels.gather(1, active - 1)


def _sorted_l_inf(x: Tensor, threshold: float) -> Tensor:
    magnitudes = x.abs()
    level = sorted_level(magnitudes, threshold).clamp(min=0)
    vanishes = magnitudes.sum(1, keepdim=True) <= threshold
    return torch.where(vanishes, 0.0, torch.minimum(torch.maximum(x, -level), level))


def _sorted_l1_ball(x: Tensor, radius: float) -> Tensor:
    magnitudes = x.abs()
    inside = magnitudes.sum(1, keepdim=True) <= radius
    return torch.where(inside, x, (magnitudes - sorted_level(magnitudes, radius)).clamp(min=0) * x.sign())


def _sorted_simplex(x: Tensor, radius: float) -> Tensor:
    return (x - sorted_level(x, radius)).clamp(min=0)


def _scaled_rows(x: Tensor, threshold: float) -> Tensor:
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x * (1 - threshold / norms).clamp(min=0)


def _soft(x: Tensor, threshold: float) -> Tensor:
    return x.sign() * (x.abs() - threshold).clamp(min=0)


def _by_svd(x: Tensor, threshold: float) -> Tensor:
    left, sigma, right = torch.linalg.svd(x, full_matrices=False)
    return (left * (sigma - threshold).clamp(min=0)) @ right


@dataclass(frozen=True)
class Kernel:
    """A prox to time.

    Args:
        penalty: builds the penalty from a threshold.
        textbook: the usual implementation in torch; in float64 it is the reference for all candidates.
        textbook_name: its label.
        scale: the unit of thresholds for a matrix of normal numbers, a function of rows and columns.
        matrices: shapes to time.
        by_rows: whether the prox acts on each row separately.
    """

    penalty: Callable[[float], Penalty]
    textbook: MatrixProx
    textbook_name: str
    scale: Callable[[int, int], float]
    matrices: list[tuple[int, int]]
    by_rows: bool = True


def _row_sum(rows: int, columns: int) -> float:
    """Return the expected ℓ1 norm of a row of normal numbers."""
    return 0.798 * columns


# in units of the scale: cuts few elements, cuts many, zeroes most rows
THRESHOLDS = {"small": 1e-3, "medium": 0.1, "large": 1.02}
KERNELS = {
    "ℓ∞,1": Kernel(GroupLInf, _sorted_l_inf, "sort + cumsum", _row_sum, MATRICES),
    "ℓ1 ball": Kernel(lambda t: L1Ball(t, dim=0), _sorted_l1_ball, "sort + cumsum", _row_sum, MATRICES),
    "simplex": Kernel(lambda t: Simplex(t, dim=0), _sorted_simplex, "sort + cumsum", _row_sum, MATRICES),
    "ℓ2,1": Kernel(GroupL2, _scaled_rows, "norms", lambda rows, columns: columns**0.5, MATRICES),
    "ℓ1": Kernel(L1, _soft, "sign and clamp", lambda rows, columns: 1.0, MATRICES[:1]),
    "nuclear": Kernel(
        Nuclear,
        _by_svd,
        "SVD",
        lambda rows, columns: rows**0.5 + columns**0.5,
        [*MATRICES, (256, 256)],
        by_rows=False,
    ),
}


def kernels(folder: Path, repeats: int, chosen: dict[str, Kernel] = KERNELS) -> None:
    """Time the kernels on one and two threads."""
    console = Console()
    rows: list[tuple[str, ...]] = []
    numbers: dict[str, Any] = {}
    for name, kernel in chosen.items():
        others = _installed(name, console)
        for shape in kernel.matrices:
            for count in (1, 2):
                found = {
                    kind: _times(name, kernel, others, shape, share, count, repeats, console)
                    for kind, share in THRESHOLDS.items()
                }
                title = f"{name}, {shape[0]} x {shape[1]}, threads: {count}"
                numbers[title] = found
                rows.append((name, f"{shape[0]} x {shape[1]}", str(count), *_summary(kernel, list(found.values()))))
                console.print(f"{title}: done")
    figure = Figure(figsize=(10, 2.3 * len(chosen) + 1), layout="constrained")
    panels = figure.subplots(len(chosen), 2, squeeze=False)
    for line, (name, kernel) in zip(panels, chosen.items(), strict=True):
        for axes, count in zip(line, (1, 2), strict=True):
            shape = kernel.matrices[0]
            found = numbers[f"{name}, {shape[0]} x {shape[1]}, threads: {count}"]["medium"]
            ratios = {candidate: seconds / found["copy"] for candidate, seconds in found.items()}
            bars(
                axes,
                ratios,
                f"{name}, {shape[0]} x {shape[1]}, threads: {count}\ntime / copy",
                FUSED,
                EAGER,
            )
            axes.set_xscale("log")
    columns = ("prox", "matrix", "threads", "fused / copy", "eager / copy")
    columns += ("textbook / fused", "textbook / eager", "best peer", "best peer / fused")
    write(folder, "kernels", numbers, figure, columns, rows)


def _installed(name: str, console: Console) -> dict[str, MatrixProx]:
    found = {}
    for peer, prox in peers.installed(name):
        if isinstance(prox, str):
            console.print(f"{name}: skipped {peer}: {prox}", soft_wrap=True)
        else:
            found[peer] = prox
    return found


def _times(
    name: str,
    kernel: Kernel,
    others: dict[str, MatrixProx],
    shape: tuple[int, int],
    share: float,
    count: int,
    repeats: int,
    console: Console,
) -> dict[str, float]:
    """Return the seconds of each correct candidate."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    threshold = share * kernel.scale(*shape)
    penalty = kernel.penalty(threshold)
    candidates: dict[str, MatrixProx] = {
        FUSED: lambda x, t: penalty.prox(x, 1.0, fused=True),
        EAGER: lambda x, t: penalty.prox(x, 1.0),
        kernel.textbook_name: kernel.textbook,
        **{peer: prox for peer, prox in others.items() if x.numel() < TOO_LARGE or (name, peer) not in HUNGRY},
    }
    sample = x[:64].contiguous()
    exact = kernel.textbook(sample.double(), threshold)
    buffer = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: buffer.copy_(x)}
    with threads(count):
        for candidate, prox in candidates.items():
            ours = candidate in (FUSED, EAGER)
            tolerance = 1e-5 if ours else 1e-3  # some peers are less accurate than float32 allows
            reason = _reason_to_skip(prox, sample, threshold, exact, x.numel() / sample.numel(), tolerance)
            if ours and kernel.by_rows and not reason:
                error = _relative_error(prox(x, threshold)[:64], exact, sample)
                reason = f"relative error {error:.1e} on the whole matrix" if error > tolerance else ""
            if not reason:
                calls[candidate] = _bound(prox, x, threshold)
            elif candidate in others:
                console.print(f"{name}: skipped {candidate} on {shape}, threshold {share}: {reason}", soft_wrap=True)
            else:
                raise AssertionError(f"{name}, {candidate}, on {shape}, threshold {share}: {reason}")
        return by_turns(calls, repeats, max_seconds=0.5)


def _reason_to_skip(
    prox: MatrixProx, sample: Tensor, threshold: float, exact: Tensor, sample_count: float, tolerance: float
) -> str:
    """Return why not to time a prox: it fails or is wrong on a sample of rows, or is too slow for all; else ""."""
    try:
        prox(sample, threshold)  # compiles it, if needed
        start = time.perf_counter()
        found = prox(sample, threshold)
    except Exception as failure:  # peers fail in many ways
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    seconds = (time.perf_counter() - start) * sample_count
    error = _relative_error(found, exact, sample)
    if not error <= tolerance:  # also if NaN
        return f"relative error {error:.1e}"
    return f"would take about {seconds:.0f} s" if seconds > 8 else ""


def _relative_error(found: Tensor, exact: Tensor, x: Tensor) -> float:
    """Return the largest error relative to the largest element of the result, or to 1% of that of the input."""
    scale = max(exact.abs().max().item(), 0.01 * x.abs().max().item())
    return (found.double() - exact).abs().max().item() / scale


def _bound(prox: MatrixProx, x: Tensor, threshold: float) -> Callable[[], object]:
    return lambda: prox(x, threshold)


def _summary(kernel: Kernel, found: list[dict[str, float]]) -> tuple[str, ...]:
    """Format the ranges over the thresholds."""

    def ratio_range(numerator: str, denominator: str) -> str:
        return _range([f[numerator] / f[denominator] for f in found if numerator in f and denominator in f])

    ours = {"copy", FUSED, EAGER, kernel.textbook_name}
    best = [min((f[peer] / f[FUSED], peer) for peer in f.keys() - ours) for f in found if f.keys() - ours]
    return (
        ratio_range(FUSED, "copy"),
        ratio_range(EAGER, "copy"),
        ratio_range(kernel.textbook_name, FUSED),
        ratio_range(kernel.textbook_name, EAGER),
        ", ".join(sorted({peer for _, peer in best})) or "none",
        _range([ratio for ratio, _ in best]),
    )


def _range(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    low, high = f"{min(ratios):.3g}", f"{max(ratios):.3g}"
    return low if low == high else f"{low} to {high}"
