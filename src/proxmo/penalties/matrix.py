"""Penalties on the singular values of a tensor read as a matrix.

The axes in `dim` are the rows and all others the columns, so a conv kernel with `dim=0` is the matrix of its output
channels. Each prox keeps the singular vectors and scales the singular values σ by gains in [0, 1]; its step is one
number. An entry that is not finite makes the whole matrix NaN, since every singular value depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from proxmo.penalties.axes import Groups, Step, indexing_axes
from proxmo.penalties.base import Count, Dim, NonNegativeFloat
from proxmo.penalties.kinds import Constraint, WithDim
from proxmo.penalties.spectrum import scale_singular_values, singular_values
from proxmo.penalties.thresholds import project_simplex


def _rounding(x: Tensor, dim: Dim) -> float:
    """Return a bound on the rounding errors of singular values, relative to the largest one."""
    rows = prod([x.shape[axis] for axis in indexing_axes(x, dim)])
    return max(rows, x.numel() // rows) * torch.finfo(torch.float64).eps


@dataclass
class Nuclear(WithDim):
    """s·Σσ (nuclear norm): a convex penalty for low rank.

    prox: σ ← max(σ − t, 0), t = step·s.

    Args:
        strength: s ≥ 0.
        dim: the axes that are the rows of the matrix.

    >>> Nuclear(1.0).prox(torch.tensor([[3.0, 0.0], [0.0, 0.5]]), step=1.0)
    tensor([[2., 0.],
            [0., 0.]])
    """

    strength: NonNegativeFloat
    dim: Dim = 0
    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = False

    def _value(self, x: Tensor) -> Tensor:
        return (self.strength * singular_values(x, self.dim).sum()).to(x.dtype)

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        threshold = step * self.strength
        if self.strength == 0 or (not isinstance(threshold, Tensor) and threshold == 0):
            return x

        def gains(sigma: Tensor) -> Tensor:
            return torch.where(sigma <= threshold, 0.0, (sigma - threshold) / sigma)

        return scale_singular_values(x, self.dim, gains, out)


@dataclass
class Rank(WithDim, Constraint):
    """Matrices of at most the given rank.

    prox: keep the largest singular values, drop the others (Eckart and Young).

    Args:
        rank: the largest rank allowed, ≥ 0.
        dim: the axes that are the rows of the matrix.

    >>> Rank(1).prox(torch.tensor([[3.0, 0.0], [0.0, 0.5]]), step=1.0)
    tensor([[3., 0.],
            [0., 0.]])
    """

    rank: Count
    dim: Dim = 0
    convex: ClassVar[bool] = False
    separable: ClassVar[bool] = False

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        sigma = singular_values(x, self.dim)
        # rounding the entries moves no singular value by more than the norm of what was rounded off
        allowed = (slack + _rounding(x, self.dim)) * sigma.square().sum().sqrt()
        small: Tensor = sigma[self.rank :] <= allowed
        return small.all() & sigma.isfinite().all()

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        def gains(sigma: Tensor) -> Tensor:
            return (torch.arange(len(sigma), device=sigma.device) >= len(sigma) - self.rank).to(sigma.dtype)

        return scale_singular_values(x, self.dim, gains, out)


@dataclass
class NuclearBall(WithDim, Constraint):
    """Matrices with Σσ ≤ radius: low rank through a budget.

    prox: project the singular values onto the ℓ1 ball.

    Args:
        radius: the largest nuclear norm allowed, ≥ 0.
        dim: the axes that are the rows of the matrix.

    >>> NuclearBall(2.0).prox(torch.tensor([[3.0, 0.0], [0.0, 0.5]]), step=1.0)
    tensor([[2., 0.],
            [0., 0.]])
    """

    radius: NonNegativeFloat
    dim: Dim = 0
    convex: ClassVar[bool] = True
    separable: ClassVar[bool] = False

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        sigma = singular_values(x, self.dim)
        # rounding each entry can raise every singular value
        return sigma.sum() <= self.radius * (1 + slack * sqrt(len(sigma)) + _rounding(x, self.dim))

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        def gains(sigma: Tensor) -> Tensor:
            groups = Groups(sigma, None)
            kept = project_simplex(groups.elements.clone(), self.radius, groups)
            outside = torch.where(sigma == 0, 0.0, kept / sigma)
            return torch.where(sigma.sum() <= self.radius, 1.0, outside)

        return scale_singular_values(x, self.dim, gains, out)
