"""Linear models with a goal: a penalty to the end, or blocks that leave one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from proxmo.layers import with_fields
from proxmo.penalties import Penalty, TopK, Trimmed
from proxmo.progress import Progress
from proxmo.sklearn.full_batch import Objective, Solution, minimize
from proxmo.sklearn.goals import Goal
from proxmo.sklearn.problem import Outcome, Problem
from proxmo.sklearn.units import InUnits
from proxmo.targets import HOLD

PERCENT = 100  # what the progress bar counts: how many steps there will be is not known
STAGES = 20  # from all blocks to those that are kept
DENSE_STEPS = 100  # before the first blocks leave
KEPT_STEPS = 500  # for the blocks that stay
STAGE_STEPS = 20  # steps for the blocks that are left to take over from those that went

Observer = Callable[[Solution], None]


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
        self._curve, self._stage, self._stages = [], 0, 1
        with Progress(PERCENT, "fit", shown=self._verbose) as progress:

            def observe(solution: Solution) -> None:
                zero = solution.point[:, :-1] == 0
                progress.reach(int(PERCENT * (self._stage + solution.progress) / self._stages))
                progress.show(
                    loss=solution.loss,
                    zeros=lambda: f"{float(zero.double().mean()):.0%}",
                    inputs=lambda: int((~zero).any(0).sum()),
                )

            solution = self._solve(goal, observe)
        layers = self._problem.in_data_units([self.point[:, :-1]], [self.point[:, -1]], self._ones)
        return Outcome(layers, solution.loss, solution.value, self._curve, solution.converged)

    def _solve(self, goal: Goal, observe: Observer) -> Solution:
        if goal.keep is None:
            return self._minimize(self.in_units(goal.penalty), self._max_iter, observe)
        assert goal.penalty is not None
        # There is no strength, so blocks are compared by what they contribute: in units of their columns.
        trimmed = Trimmed(with_fields(goal.penalty, strength=HOLD), 1.0)  # type: ignore[arg-type]
        blocks = prod(trimmed.block_shape(self.null[:, :-1]))
        kept = goal.count_to_keep(blocks, self._problem.width)
        self._stages = STAGES + 1
        if torch.equal(self.point, self.null):
            self._minimize(None, DENSE_STEPS, observe)
        for stage, count in self._ramp(trimmed, kept):
            self._stage, trimmed.keep = stage, count
            self._minimize(trimmed, STAGE_STEPS, observe)
        self._stage = STAGES
        trimmed.keep = kept
        solution = self._minimize(trimmed, min(self._max_iter, KEPT_STEPS), observe)
        # A choice of inputs has been made, which more digits do not improve; without a penalty there may be no minimum.
        return replace(solution, converged=True)

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

    def _minimize(self, penalty: Penalty | None, max_iter: int, observe: Observer) -> Solution:
        objective = Objective(self._problem, penalty)
        solution = minimize(objective, self.point, self.null, tol=self._tol, max_iter=max_iter, observe=observe)
        self.point = solution.point
        self._curve += solution.values
        return solution

    def fit_null(self) -> Tensor:
        """Fit the intercept alone, and return the gradient in the weights there."""
        self._minimize(TopK(0), self._max_iter, lambda _: None)
        objective = Objective(self._problem, None)
        return objective.gradient(objective.slopes(objective.outputs(self.point))[1])[:, :-1]
