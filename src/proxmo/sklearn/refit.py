"""Weights of inputs that stay, in coordinates in which the inputs are uncorrelated.

Without a penalty, the loss can be minimised in any coordinates. In those of the weights, nearly collinear columns slow
the steps down; in coordinates without correlations a few steps suffice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proxmo.sklearn.full_batch import Objective, Observer, Solution, minimize
from proxmo.sklearn.inputs import DenseInputs
from proxmo.sklearn.problem import Problem

DECOMPOSED = 64 * torch.finfo(torch.float64).eps  # relative error of singular values in float64
LARGEST = 1e9  # operations of a decomposition; more take longer than the steps that they save


@dataclass
class Refit:
    """A problem for some of the columns of another, and the way to its points and back."""

    original: Problem
    problem: Problem
    columns: Tensor
    _there: Tensor
    _back: Tensor

    @classmethod
    def of(cls, problem: Problem, columns: Tensor) -> Refit | None:
        """Return the problem for some columns, or ``None`` if they are too many."""
        if len(problem.inputs) * len(columns) ** 2 > LARGEST or not len(columns):
            return None
        picked = problem.inputs.pick(columns.numpy())
        values = picked.times(torch.eye(len(columns), dtype=problem.dtype)).double()
        roots = problem.weights.double().sqrt()
        _, sizes, directions = torch.linalg.svd(roots[:, None] * values, full_matrices=False)
        # Rounded values have a relative error of eps at most, and move no singular value by more than its norm.
        seen = sizes > max(torch.finfo(problem.dtype).eps, DECOMPOSED) * sizes.norm()
        there, back = directions[seen].mT * sizes[seen], (directions[seen] / sizes[seen, None])
        inputs = DenseInputs((values @ back.mT).to(problem.dtype))
        return cls(problem, replace(problem, inputs=inputs), columns, there, back)

    def minimize(self, start: Tensor, null: Tensor, *, tol: float, max_iter: int, observe: Observer) -> Solution:
        """Minimise the loss from a point of the original problem, and return such a point with its loss there."""

        def leave(solution: Solution) -> Solution:
            weight = torch.zeros_like(start[:, :-1])
            weight[:, self.columns] = (solution.point[:, :-1].double() @ self._back).to(weight.dtype)
            return replace(solution, point=torch.cat([weight, solution.point[:, -1:]], 1))

        objective, show = Objective(self.problem, None), lambda solution: observe(leave(solution))
        found = minimize(objective, self._enter(start), self._enter(null), tol=tol, max_iter=max_iter, observe=show)
        point, original = leave(found).point, Objective(self.original, None)
        loss, _ = original.slopes(original.outputs(point))
        return replace(found, point=point, loss=loss, value=loss)

    def _enter(self, point: Tensor) -> Tensor:
        weight = (point[:, self.columns].double() @ self._there).to(point.dtype)
        return torch.cat([weight, point[:, -1:]], 1)
