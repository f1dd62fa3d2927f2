"""The runs of `benchmarks.adaptive` and their records, also as the report of `benchmarks.targets` takes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from benchmarks.adaptive_methods import METHODS, TARGETS, Point
from benchmarks.targets_methods import Kind
from benchmarks.targets_report import Look, Looks
from benchmarks.targets_report import Record as AtTarget

LOOKS: Looks = {
    "dense": Look("dense AdamW", "black"),
    "trimmed": Look("trimmed ProxAdamW", "#D55E00", "o"),
    "trimmed-block": Look("trimmed ProxAdamW, metric by block", "#CC79A7", "o"),
    "gradual": Look("AdamW, gradual pruning", "#0072B2", "s"),
    "gradual-each": Look("AdamW, gradual pruning of each layer", "#56B4E9", "<"),
    "pat": Look("AdamW, torchao PAT", "#E69F00", "^"),
    "prox-adamw": Look("ℓ1 or ℓ2,1, ProxAdamW", "#D55E00", "P"),
    "prox-lion": Look("ℓ1, ProxLion", "#009E73", "D"),
    "prox-sgd": Look("ℓ1, ProxSGD", "#882255", "v"),
    "naive": Look("ℓ1, AdamW and soft threshold", "#999999", "X"),
    "l1-in-loss": Look("ℓ1 in the loss of AdamW, then cut", "#666666", "d"),
    "ramda": Look("ℓ2,1, RAMDA", "#44AA99", "h"),
    "its-prox-adamw": Look("ℓ2,1, ProxAdamW of RAMDA's authors", "#332288", "p"),
}


@dataclass(frozen=True)
class Run:
    """One point of the grid."""

    task: str
    kind: Kind
    method: str
    level: float
    """A target, a strength, or 0 for dense training."""
    lr: float
    """For SGD relative to the lr of the task."""
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.kind}, {self.method}, {self.level:g}, lr {self.lr:g}, seed {self.seed}"

    def path(self, out: Path) -> Path:
        name = f"{self.task}-{self.kind}-{self.method}-{self.level:g}-{self.lr:g}-{self.seed}.json"
        return out / "records" / name


@dataclass(frozen=True)
class Record(Run):
    """A run with the points that came out."""

    metric: str
    points: list[Point]
    seconds: float

    def summary(self) -> str:
        found = ", ".join(f"{score:.4f} with {removed:.2%} removed" for removed, score in self.points)
        return f"{self.metric} {found}, {self.seconds:.1f} s"


def as_targets(records: list[Record]) -> list[AtTarget]:
    """Return a record for each target: those of methods with strengths are interpolated there."""

    def curve(record: Record) -> tuple[str, str, str, int]:
        return record.task, record.kind, record.method, record.seed

    tasks = list(dict.fromkeys(record.task for record in records))
    ordered = sorted(records, key=lambda record: (tasks.index(record.task), *curve(record)))
    return [found for _, group in groupby(ordered, curve) for found in _on_curve(list(group))]


def _on_curve(records: list[Record]) -> Iterator[AtTarget]:
    """Yield what one method reached with one seed at each target."""
    first = records[0]
    if not METHODS[first.method].strengths:
        for record in records:
            yield _at(record, record.level, Point(*record.points[0]))
        return
    for target in TARGETS[first.kind]:
        score = score_at(records, target)
        if score is not None:
            yield _at(first, target, Point(target, score))


def score_at(records: list[Record], target: float, outside: bool = False) -> float | None:
    """Return the score of a method at a target, from its runs with several strengths or from a single run.

    ``None`` if the target is outside of the shares that the strengths reach; ``outside`` is that of `interpolated`.
    """
    first = records[0]
    if first.method == "l1-in-loss":  # it is cut to every target, so that the strength is free: the best is taken
        best = max if first.metric == "accuracy" else min
        return best(record.points[TARGETS[first.kind].index(target)][1] for record in records)
    points = [Point(*record.points[0]) for record in records]
    return interpolated(points, target, outside) if METHODS[first.method].strengths else points[0].score


def interpolated(points: list[Point], removed: float, outside: bool = False) -> float | None:
    """Return the score at a share removed, linear in the log of the share left; ``None`` outside of the points.

    With ``outside``, shares beyond the largest are extrapolated, and those below the smallest get its score: removing
    less would hardly be worse, and how much better is not known.
    """
    ordered = [point for point in sorted(points) if point.removed < 1]
    if outside and ordered and removed < ordered[0].removed:
        return ordered[0].score
    pairs = [(before, after) for before, after in pairwise(ordered) if before.removed < after.removed]
    for before, after in pairs:
        if before.removed <= removed <= after.removed or (outside and after is ordered[-1]):
            start, end = math.log(1 - before.removed), math.log(1 - after.removed)
            weight = (math.log(1 - removed) - start) / (end - start)
            return (1 - weight) * before.score + weight * after.score
    return None


def _at(record: Record, target: float, point: Point) -> AtTarget:
    return AtTarget(
        *(record.task, record.kind, target, record.method, record.seed, record.metric, point.score, point.removed),
        widths=None,
        runs=1,
        strength=None,
        seconds=record.seconds,
    )
