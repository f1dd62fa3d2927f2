"""What the paper says of its experiments, beside what was measured here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from proxmo.experiments import synthetic
from proxmo.experiments.comparison import PAPER_RATE, Comparison
from proxmo.experiments.training import Record, Setting

# Section 8.1: where vanilla with batch 1 oscillates, and M and γ tuned for momentum.
PAPER_FLOOR = {5.0: 22.0, 25.0: 672.0, 125.0: 14381.0}
PAPER_TUNED = {5.0: (10.0, 1e-2), 25.0: (10.0, 1e-3), 125.0: (100.0, 1e-4)}
# Section 8.2: lr = 1/M tuned for momentum at each batch size; γ = 0.1 at all of them.
PAPER_RATES = {64: 0.01, 128: 0.01, 256: 0.1}
SMOOTH_FROM = 8  # epochs: of fewer, the second half says nothing
CLOSE = 0.2  # a floor is as in the paper if it is within this share of it


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, what was measured, and whether that agrees."""

    statement: str
    paper: str
    measured: str
    agrees: bool


def short(number: float) -> str:
    """Three digits, or whole numbers above 100."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def synthetic_claims(results: synthetic.Results) -> list[Claim]:
    """Floors, who reaches the tolerance, and what is tuned, for each noise level."""
    claims = []
    for sigma in synthetic.SIGMAS:
        at = f"σ = {sigma:g}: "
        floor = results.cells[results.find("vanilla", sigma, M=10.0)].stationary
        lowest = results.cells[results.best("vanilla", sigma)]
        measured = f"{short(floor)}; {short(lowest.stationary)} with M = {short(lowest.M or 0)}"
        agrees = math.isclose(floor, PAPER_FLOOR[sigma], rel_tol=CLOSE)
        claims.append(
            Claim(at + "vanilla, batch 1, M = 10, oscillates around", short(PAPER_FLOOR[sigma]), measured, agrees)
        )
        for batch in synthetic.BATCHES:
            share = max(results.cells[i].hit_share for i in _cells(results, "vanilla", sigma, batch))
            reaches = batch > 1 and sigma == 5
            claims.append(_reach(at + f"vanilla, batch {batch}, best M", reaches, share))
        M, gamma = PAPER_TUNED[sigma]
        share = results.cells[results.find("momentum", sigma, M=M, gamma=gamma)].hit_share
        claims.append(_reach(at + f"momentum with M = {M:g}, γ = {gamma:g}", True, share))
        tuned = fastest(results, sigma)
        gammas, sizes = (sorted({getattr(cell, field) for cell in tuned}) for field in ("gamma", "M"))
        for name, paper, found in (("γ", gamma, gammas), ("M", M, sizes)):
            measured = " or ".join(f"{value:g}" for value in found) or "none for half of the seeds"
            claims.append(
                Claim(at + f"{name} that reaches it with fewest samples", f"{paper:g}", measured, paper in found)
            )
    return claims


def fastest(results: synthetic.Results, sigma: float) -> list[synthetic.CellResult]:
    """The settings of momentum that reach the tolerance with fewest samples, by the median; none if half never do."""
    cells = [results.cells[i] for i in _cells(results, "momentum", sigma, 1)]
    fewest = min((cell.median_samples for cell in cells if cell.median_samples is not None), default=None)
    return [] if fewest is None else [cell for cell in cells if cell.median_samples == fewest]


def _cells(results: synthetic.Results, method: synthetic.Method, sigma: float, batch: int) -> list[int]:
    found = enumerate(results.cells)
    return [i for i, cell in found if (cell.method, cell.sigma, cell.batch) == (method, sigma, batch)]


def _reach(statement: str, reaches: bool, share: float) -> Claim:
    return Claim(
        statement + f" reaches {synthetic.TOLERANCE:g}",
        "yes" if reaches else "no",
        f"{share:.0%} of the seeds",
        (share >= 0.5) == reaches,
    )


def comparison_claims(comparison: Comparison) -> list[Claim]:
    """That momentum is ahead, in both measures; at the setting of the paper and when both are tuned."""
    batch = comparison.batches[0]
    vanilla, momentum = (comparison.tuned(batch, vanilla=kind) for kind in (True, False))
    pairs = [("each tuned", vanilla, momentum)]
    if comparison.experiment == "regularized":
        at_paper = [record.setting for record in comparison.of(batch=batch, lr=PAPER_RATE, seed=0)]
        both = [next((s for s in at_paper if s.momentum == m), None) for m in (0.0, 0.9)]
        if both[0] is not None and both[1] is not None:
            pairs.insert(0, (f"lr = {PAPER_RATE:g}, momentum 0.9", both[0], both[1]))
    claims = []
    for where, without, with_momentum in pairs:
        claims += [
            _ahead(comparison, "training loss", "train_loss", where, without, with_momentum, less_is_better=True),
            _ahead(comparison, "test accuracy", "test_accuracy", where, without, with_momentum, less_is_better=False),
        ]
    where, without, with_momentum = pairs[0]
    if without.epochs >= SMOOTH_FROM:
        claims.append(_smoother(comparison, where, without, with_momentum))
    if comparison.experiment == "regularized" and len(comparison.batches) > 1:
        for size in comparison.batches:
            best = comparison.tuned(size, vanilla=False)
            paper = PAPER_RATES.get(size)
            if paper is not None:
                said = f"lr {paper:g}, momentum 0.9"
                measured = f"lr {best.lr:g}, momentum {best.momentum:g}"
                claims.append(
                    Claim(
                        f"batch {size}: best for momentum by training loss, one seed", said, measured, said == measured
                    )
                )
    return claims


def roughness(record: Record) -> float:
    """How far test accuracy goes back and forth per epoch, in the second half of a run: 0 if it only rises."""
    accuracies = [epoch.test_accuracy for epoch in record.epochs[len(record.epochs) // 2 :]]
    way = sum(abs(b - a) for a, b in pairwise(accuracies))
    return (way - abs(accuracies[-1] - accuracies[0])) / (len(accuracies) - 1)


def _smoother(comparison: Comparison, where: str, without: Setting, with_momentum: Setting) -> Claim:
    ours, theirs = (
        None if any(run.diverged for run in runs) else mean(map(roughness, runs))
        for runs in map(comparison.seeds, (with_momentum, without))
    )
    return Claim(
        f"test accuracy: momentum's is smoother ({where}; way back and forth per epoch, in the second half)",
        "yes",
        " against ".join("diverged" if found is None else f"{found:.2%}" for found in (ours, theirs)),
        ours is not None and (theirs is None or ours < theirs),
    )


def _ahead(
    comparison: Comparison,
    label: str,
    measure: str,
    where: str,
    without: Setting,
    with_momentum: Setting,
    *,
    less_is_better: bool,
) -> Claim:
    ours, theirs = (comparison.summary(setting, measure) for setting in (with_momentum, without))
    form = ".1%" if measure == "test_accuracy" else ".3f"
    said = " against ".join("diverged" if found is None else found.said(form) for found in (ours, theirs))
    if ours is None or theirs is None:
        better = ours is not None
    else:
        better = ours.mean < theirs.mean if less_is_better else ours.mean > theirs.mean
    return Claim(f"{label}: momentum is ahead ({where})", "yes", said, better)
