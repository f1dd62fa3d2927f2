"""Linear models with a goal: a penalty to the end, or blocks that leave one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from proxmo.layers import with_fields
from proxmo.penalties import Penalty, TopK, Trimmed
from proxmo.progress import Progress
from proxmo.sklearn.full_batch import Objective, Observer, Solution, ignore, minimize
from proxmo.sklearn.goals import Goal
from proxmo.sklearn.problem import Outcome, Problem
from proxmo.sklearn.refit import Refit
from proxmo.sklearn.units import InUnits
from proxmo.targets import HOLD

PERCENT = 100  # what the progress bar counts: how many steps there will be is not known
KEPT_TOL = 1e-3  # at least, as more digits do not improve a choice; separable classes would need many steps for each
FINE_STEPS = 200  # for more digits than those, if they suffice: for squared errors a few do
STAGES = 20  # from all blocks to those that are kept
DENSE_STEPS = 100  # before the first blocks leave, or a quarter of all steps
STAGE_STEPS = 20  # in each stage, to refit the blocks that are left; half of all steps for all stages


class Bar:
    """Shows a fit of one or more stages on a progress line."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.stage, self.stages = 0, 1

    def __call__(self, solution: Solution) -> None:
        zero = solution.point[:, :-1] == 0
        self._progress.reach(int(PERCENT * (self.stage + solution.progress) / self.stages))
        self._progress.show(
            loss=solution.loss,
            zeros=lambda: f"{float(zero.double().mean()):.0%}",
            inputs=lambda: int((~zero).any(0).sum()),
        )


class LinearFit:
    """A linear model of a problem, fitted to one goal after the other, each from the solution before."""

    def __init__(self, problem: Problem, *, tol: float, max_iter: int, verbose: bool) -> None:
        self._problem, self._tol, self._max_iter, self._verbose = problem, tol, max_iter, verbose
        self._ones = torch.ones(1, dtype=problem.dtype)
        weight = torch.zeros(problem.outputs, problem.width, dtype=problem.dtype)
        self.null = torch.cat([weight, problem.task.center[:, None] * float(problem.fit_intercept)], 1)
        self.point = self.null
        self._curve: list[float] = []

    def fit(self, goal: Goal) -> Outcome:
        """Fit the model to a goal, from the solution of the last one."""
        self._curve = []
        with Progress(PERCENT, "fit", shown=self._verbose) as progress:
            bar = Bar(progress)
            if goal.keep is None:
                solution = self._minimize(self.in_units(goal.penalty), self._max_iter, bar)
            else:
                solution = self._select(goal, bar)
        layers = self._problem.in_data_units([self.point[:, :-1]], [self.point[:, -1]], self._ones)
        return Outcome(layers, solution.loss, solution.value, self._curve, solution.converged)

    def _select(self, goal: Goal, bar: Bar) -> Solution:
        """Let blocks leave until as many are left as the goal says, and minimise the loss over their weights."""
        assert goal.penalty is not None
        # There is no strength, so blocks are compared by what they contribute: in units of their columns.
        trimmed = Trimmed(with_fields(goal.penalty, strength=HOLD), 1.0)  # type: ignore[arg-type]
        blocks = prod(trimmed.block_shape(self.null[:, :-1]))
        kept = goal.count_to_keep(blocks, self._problem.width)
        bar.stages = STAGES + 1
        if torch.equal(self.point, self.null):
            self._minimize(None, min(DENSE_STEPS, self._max_iter // 4), bar)
        steps = min(STAGE_STEPS, self._max_iter // (2 * STAGES))
        for stage, count in self._ramp(trimmed, kept):
            bar.stage, trimmed.keep = stage, count
            self._minimize(trimmed, steps, bar)
        bar.stage, trimmed.keep = STAGES, kept
        solution = self._minimize(trimmed, max(1, steps), bar)
        left, tol = self._max_iter - len(self._curve), max(self._tol, KEPT_TOL)
        if solution.converged or left < 1:
            return solution
        whole_columns = goal.first_only or self._problem.outputs == 1
        columns = (self.point[:, :-1] != 0).any(0).nonzero()[:, 0]
        refit = Refit.of(self._problem, columns) if whole_columns else None
        if refit is not None:
            refitted = self._minimize_over_kept(refit, tol, left, bar)
            if refitted.loss <= solution.loss:  # not if rounding of large weights that nearly cancel has raised it
                return self._take(refitted)
        objective = Objective(self._problem, trimmed)
        return self._take(minimize(objective, self.point, self.null, tol=tol, max_iter=left, observe=bar))

    def _minimize_over_kept(self, refit: Refit, tol: float, max_iter: int, bar: Bar) -> Solution:
        """Minimise the loss over the weights that are left, to ``self._tol`` if few steps suffice, else to ``tol``."""
        few = min(max_iter - 1, FINE_STEPS)
        fine = refit.minimize(self.point, self.null, tol=self._tol, max_iter=few, observe=bar)
        if fine.converged:
            return fine
        left = max_iter - len(fine.values)
        coarse = refit.minimize(fine.point, self.null, tol=tol, max_iter=left, observe=bar)
        return replace(coarse, values=[*fine.values, *coarse.values])

    def _ramp(self, trimmed: Trimmed, kept: int) -> Iterator[tuple[int, int]]:
        """Yield stages and falling counts, along a cubic as `KeepScheduler` does."""
        present = trimmed.count_nonzero([self.point[:, :-1]])
        for stage in range(1, STAGES):
            count = kept + round((present - kept) * (1 - stage / STAGES) ** 3)
            if kept < count < present:
                yield stage, count

    def in_units(self, penalty: Penalty | None) -> Penalty | None:
        """Return a penalty on weights in the units of the data as one on the weights here."""
        return penalty and InUnits(penalty, self._problem.units(1, self._ones))

    def _minimize(self, penalty: Penalty | None, max_iter: int, observe: Observer = ignore) -> Solution:
        objective = Objective(self._problem, penalty)
        return self._take(minimize(objective, self.point, self.null, tol=self._tol, max_iter=max_iter, observe=observe))

    def _take(self, solution: Solution) -> Solution:
        self.point = solution.point
        self._curve += solution.values
        return solution

    def fit_null(self) -> tuple[Tensor, Tensor]:
        """Fit the intercept alone, and return the gradient in the weights there, and the largest one for any inputs.

        The largest one is that of inputs which are proportional to the slopes of the samples; ones if all slopes are 0.
        """
        all_zero = TopK(0)  # a constraint
        self._minimize(all_zero, self._max_iter)
        objective, weights = Objective(self._problem, None), self._problem.weights[:, None]
        _, slopes = objective.slopes(objective.outputs(self.point))
        gradient = objective.gradient(slopes)[:, :-1]
        largest = (slopes.square() / weights.where(weights > 0, torch.inf)).sum(0).sqrt()
        return gradient, (largest if bool(largest.any()) else torch.ones_like(largest))[:, None].expand_as(gradient)
