"""Linear models by the accelerated proximal gradient method on all samples, to an accuracy that is estimated.

A linear model is cheap to evaluate on all samples, and its loss is mostly convex. Steps without noise then reach in
seconds what stochastic ones do not reach at all: four digits of the objective, and the zeros of the solution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proxmo.penalties import Penalty
from proxmo.sklearn.losses import mean_and_slopes
from proxmo.sklearn.problem import Problem

FLOOR = 1e-3  # accuracy is relative to F, but not to less than this share of the F of the model without inputs
RELAX = 0.98  # on the curvature after each step, as it may be smaller elsewhere
ROUNDING = 64  # a tolerance is at least so many roundings
SETTLED = 0.01  # a run ends only after a move of at most this share of the largest distance from the null model
LONGER = 100  # factor on the length of the first probe as long as it has no effect
STEEPER = 10  # the largest factor on the curvature at once: a loss such as exp may overflow a step away
TRIES = 40  # of a smaller step, before rounding is to blame
IDLE_STEPS = 200  # without a smaller F, before rounding is to blame


@dataclass
class Objective:
    """F = mean loss(A·vᵀ + c) + ψ(v), at points of shape (outputs, columns + 1) with c as the last column."""

    problem: Problem
    penalty: Penalty | None

    def outputs(self, point: Tensor) -> Tensor:
        return self.problem.inputs.times(point[:, :-1]) + point[:, -1]

    def slopes(self, outputs: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss and its gradient in the outputs."""
        task = self.problem.task
        return mean_and_slopes(task.loss, outputs, task.targets, self.problem.weights)

    def gradient(self, slopes: Tensor) -> Tensor:
        bias = slopes.sum(0) if self.problem.fit_intercept else torch.zeros_like(slopes[0])
        return torch.cat([self.problem.inputs.pull_back(slopes), bias[:, None]], 1)

    def penalty_value(self, point: Tensor) -> float:
        return 0.0 if self.penalty is None else float(self.penalty.total([point[:, :-1]]))

    def step(self, point: Tensor, gradient: Tensor, size: float) -> Tensor:
        """Return prox(point − size·gradient)."""
        moved = point - size * gradient
        if self.penalty is not None and moved.shape[1] > 1:
            weight = moved[:, :-1].contiguous()
            self.penalty.prox_([weight], size)
            moved[:, :-1] = weight
        return moved


@dataclass
class Solution:
    """The last point, its loss and its objective, and those of all points before."""

    point: Tensor
    loss: float = math.inf
    value: float = math.inf
    converged: bool = False
    progress: float = 0.0
    """How far the run is, from 0 to 1: by the digits of the gap that it gained, or by its steps if that is more."""
    values: list[float] = field(default_factory=list)


Observer = Callable[[Solution], None]


def ignore(_: Solution) -> None:
    """Observe nothing."""


@torch.no_grad()
def minimize(
    objective: Objective,
    start: Tensor,
    null: Tensor,
    *,
    tol: float,
    max_iter: int,
    observe: Observer = ignore,
) -> Solution:
    """Minimise F from ``start`` by accelerated proximal gradient steps that never increase it but by rounding.

    The step follows the curvature along the last move. Momentum starts again whenever it points uphill, and a point
    with a larger F is not taken, so that the method is safe for penalties that are not convex, too; there it finds a
    stationary point.

    Args:
        objective: F.
        start: where to start.
        null: the point without inputs, which distances and accuracies are measured from.
        tol: stop when ‖g‖·r ≤ tol·F, where g is a subgradient of F and r the largest distance from ``null`` so far,
            and moves are short compared with r. For a convex F, ‖g‖·r bounds F − F* if the minimiser is within r of the
            last point. Not finer than rounding allows.
        max_iter: how many steps to take at most.
        observe: called after each step.
    """
    eps = torch.finfo(start.dtype).eps
    tol = max(tol, ROUNDING * eps)
    outputs = objective.outputs(start)
    start_loss, _ = objective.slopes(outputs)
    found = Solution(start, start_loss, start_loss + objective.penalty_value(start))
    ahead, outputs_ahead, weight = start, outputs, 1.0
    reach = float((start - null).norm())
    null_loss, null_slopes = objective.slopes(objective.outputs(null))
    if not (math.isfinite(null_loss) and bool(null_slopes.isfinite().all())):
        raise ValueError(
            "loss must be finite and have a finite gradient where the model starts, at outputs "
            f"{null[:, -1].tolist()}, got {null_loss}"
        )
    weights = objective.problem.weights[:, None]
    least, steepest = FLOOR * abs(null_loss), float((null_slopes.abs() / weights.where(weights > 0, math.inf)).max())
    curvature, rejected, lowest, idle, first_gap = 0.0, 0, math.inf, 0, 0.0
    while len(found.values) < max_iter and not found.converged:
        _, slopes = objective.slopes(outputs_ahead)
        gradient = objective.gradient(slopes)
        curvature = curvature or _curvature_downhill(objective, outputs_ahead, slopes, gradient)
        for _ in range(TRIES):
            new = objective.step(ahead, gradient, 1 / curvature)
            move, new_outputs = new - ahead, objective.outputs(new)
            new_loss, new_slopes = objective.slopes(new_outputs)
            length = float(move.square().sum())
            bend = float(((new_slopes - slopes) * (new_outputs - outputs_ahead)).sum())
            if length == 0 or (bend <= curvature * length and math.isfinite(new_loss)):
                break
            needed = bend / length if math.isfinite(bend) else math.inf
            curvature *= min(max(1.05, needed / curvature), STEEPER)
        value = new_loss + objective.penalty_value(new)
        # Losses are rounded as the outputs are, however small they get; it must not end what the gradient still sees.
        rounding = 4 * eps * (abs(value) + steepest * float((weights * new_outputs.abs()).sum()))
        if not value <= found.value + rounding:
            rejected += 1
            if weight == 1.0:
                curvature *= 2
            ahead, outputs_ahead, weight = found.point, outputs, 1.0
            found.converged = rejected > TRIES  # rounding hides what is left to gain
            found.values.append(found.value)
            continue
        rejected = 0
        reach = max(reach, float((new - null).norm()))
        gap = 2 * curvature * math.sqrt(length) * reach  # the new subgradient is at most 2·curvature·‖move‖
        uphill = float(((ahead - new) * (new - found.point)).sum()) > 0
        following = 1.0 if uphill else (1 + math.sqrt(1 + 4 * weight**2)) / 2
        push = 0.0 if uphill else (weight - 1) / following
        ahead, outputs_ahead = new + push * (new - found.point), new_outputs + push * (new_outputs - outputs)
        found.point, found.loss, found.value, outputs, weight = new, new_loss, value, new_outputs, following
        lowest, idle = (value, 0) if value < lowest - rounding else (lowest, idle + 1)
        found.values.append(value)
        wanted = tol * max(abs(value), least)
        settled = math.sqrt(length) <= SETTLED * reach or curvature * length <= rounding
        found.converged = (gap <= wanted and settled) or idle == IDLE_STEPS
        first_gap = max(first_gap, gap)
        found.progress = 1.0 if found.converged else max(len(found.values) / max_iter, _digits(first_gap, gap, wanted))
        curvature *= RELAX
        observe(found)
    return found


def _digits(first: float, now: float, last: float) -> float:
    """Return which share of the digits between the first and the last of falling numbers are gained."""
    return math.log(first / now) / math.log(first / last) if first > now > last > 0 else 0.0


def _curvature_downhill(objective: Objective, outputs: Tensor, slopes: Tensor, gradient: Tensor) -> float:
    """Return the curvature of the loss along its gradient, a first guess.

    The move has length 1, or the smallest power of `LONGER` that changes the slopes: outputs may be huge, and the loss
    of outliers straight.
    """
    steepness = float(gradient.norm())
    if not steepness > 0:
        return 1.0
    change = objective.outputs(-gradient / steepness)
    length = 1.0
    while math.isfinite(length):
        _, new_slopes = objective.slopes(outputs + length * change)
        bend = float(((new_slopes - slopes) * change).sum())
        if not math.isfinite(bend):
            break
        if bend != 0:
            return abs(bend) / length
        length *= LONGER
    return steepness
