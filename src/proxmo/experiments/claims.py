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
        agrees = math.isclose(floor, PAPER_FLOOR[sigma], rel_tol=CLOSE)
        claims.append(
            Claim(at + "vanilla, batch 1, oscillates around", short(PAPER_FLOOR[sigma]), short(floor), agrees)
        )
        for batch in synthetic.BATCHES:
            share = max(results.cells[i].hit_share for i in _cells(results, "vanilla", sigma, batch))
            reaches = batch > 1 and sigma == 5
            claims.append(_reach(at + f"vanilla, batch {batch}, best M", reaches, share))
        M, gamma = PAPER_TUNED[sigma]
        share = results.cells[results.find("momentum", sigma, M=M, gamma=gamma)].hit_share
        claims.append(_reach(at + f"momentum with M = {M:g}, γ = {gamma:g}", True, share))
        tuned = fastest_gamma(results, sigma)
        measured = "none reaches it" if tuned is None else f"{tuned:g}"
        claims.append(Claim(at + "γ that reaches it with fewest samples", f"{gamma:g}", measured, tuned == gamma))
    return claims


def fastest_gamma(results: synthetic.Results, sigma: float) -> float | None:
    """The γ of momentum whose runs reach the tolerance with fewest samples; if for none half do, what most reach."""
    cells = [results.cells[i] for i in _cells(results, "momentum", sigma, 1)]
    reaching = [cell for cell in cells if cell.hit_share > 0]
    if not reaching:
        return None
    return min(reaching, key=lambda cell: (cell.median_samples or math.inf, -cell.hit_share)).gamma


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
    _, without, with_momentum = pairs[0]
    rough = [mean(map(roughness, comparison.seeds(setting))) for setting in (with_momentum, without)]
    claims.append(
        Claim(
            f"test accuracy: momentum's is smoother ({pairs[0][0]}; mean change per epoch in the second half)",
            "yes",
            f"{rough[0]:.2%} against {rough[1]:.2%}",
            rough[0] < rough[1],
        )
    )
    if comparison.experiment == "regularized" and len(comparison.batches) > 1:
        for size in comparison.batches:
            best = comparison.tuned(size, vanilla=False)
            paper = PAPER_RATES.get(size)
            if paper is not None:
                said = f"lr {paper:g}, momentum 0.9"
                measured = f"lr {best.lr:g}, momentum {best.momentum:g}"
                claims.append(
                    Claim(f"batch {size}: best for momentum by training loss", said, measured, said == measured)
                )
    return claims


def roughness(record: Record) -> float:
    """The mean change of test accuracy from one epoch to the next, in the second half of a run."""
    accuracies = [epoch.test_accuracy for epoch in record.epochs[len(record.epochs) // 2 :]]
    steps = [abs(b - a) for a, b in pairwise(accuracies)]
    return mean(steps) if steps else 0.0


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
