"""Penalties on the singular values of a tensor read as a matrix.

The axes in `dim` are the rows and all others the columns, so a conv kernel with `dim=0` is the matrix of its output
channels. Each prox keeps the singular vectors and scales the singular values σ by gains in [0, 1]. An entry that is not
finite makes the whole matrix NaN, since every singular value depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite, prod, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from proxmo.parts import is_at_hand
from proxmo.penalties.axes import Groups, as_matrix, from_matrix, indexing_axes
from proxmo.penalties.base import Constraint, Count, Dim, NonNegativeFloat, WithDim
from proxmo.penalties.thresholds import project_simplex


def _finite_or_zero(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix that LAPACK accepts, and whether it is the given one."""
    finite = matrix.isfinite().all()
    return torch.where(finite, matrix, 0.0), finite


def singular_values(x: Tensor, dim: Dim) -> Tensor:
    """The singular values in decreasing order, in float64."""
    matrix, finite = _finite_or_zero(as_matrix(x, dim))
    return torch.where(finite, torch.linalg.svdvals(matrix.double()), torch.nan)


def _rounding(x: Tensor, dim: Dim) -> float:
    """How far rounding in an SVD may move singular values, relative to the largest: it grows with the longer side."""
    rows = prod([x.shape[axis] for axis in indexing_axes(x, dim)])
    return max(rows, x.numel() // rows) * torch.finfo(torch.float64).eps


def scale_singular_values(x: Tensor, dim: Dim, gains: Callable[[Tensor], Tensor], out: Tensor | None) -> Tensor:
    """U diag(gains(σ)·σ) Vᵀ for ``x`` = U diag(σ) Vᵀ; where all gains are 1 that is ``x`` to the last bit.

    Gains are in [0, 1] and grow with σ, which come in increasing order.
    """
    matrix, at_hand = as_matrix(x, dim), is_at_hand(x)
    with _full_precision(x.device.type):
        scaled = (_scaled_at_hand if at_hand else _scaled_anywhere)(matrix, gains)
    result = from_matrix(scaled, x, dim)
    if out is None and at_hand and result.stride() != x.stride():
        out = torch.empty_like(x)  # what was multiplied has a layout of its own
    return result if out is None else out.copy_(result)


def _full_precision(device: str) -> AbstractContextManager[None]:
    """Where products keep the dtype of their factors, which `torch.autocast` takes digits from."""
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if cast else nullcontext()


def _scaled_at_hand(matrix: Tensor, gains: Callable[[Tensor], Tensor]) -> Tensor:
    """Only what stays is multiplied; not on a device, which would have to be waited for to know."""
    low, high = matrix.aminmax()
    if not (isfinite(low.item()) and isfinite(high.item())):
        return torch.full_like(matrix, torch.nan)
    vectors, sigma = _factors(matrix)
    gain = gains(sigma)
    listed = gain.tolist()
    dropped = listed.count(0.0)
    if listed[0] == 1:
        return matrix.clone()
    return _recombined(matrix, vectors[:, dropped:], gain[dropped:])


def _scaled_anywhere(matrix: Tensor, gains: Callable[[Tensor], Tensor]) -> Tensor:
    given, finite = _finite_or_zero(matrix)
    vectors, sigma = _factors(given)
    gain = gains(sigma)
    scaled = torch.where((gain == 1).all(), given, _recombined(given, vectors, gain))
    return torch.where(finite, scaled, torch.nan)


def _factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The singular vectors along the shorter side, as columns, and the singular values, in increasing order.

    float32 goes through the Gram matrix in float64: several times faster than an SVD, and right to 1e-8 of the largest
    singular value, where a float32 Gram matrix would lose half of the digits. float64 needs the SVD.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    if matrix.dtype == torch.float64:
        left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
        return (right.mT if tall else left).flip(-1), sigma.flip(-1)
    matrix = matrix.double()
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix if tall else matrix @ matrix.mT)
    return vectors, squares.clamp(min=0).sqrt()


def _recombined(matrix: Tensor, vectors: Tensor, gain: Tensor) -> Tensor:
    """U diag(gain) Uᵀ X, or X V diag(gain) Vᵀ: so only the shorter side's vectors are needed, and 0 leaves nothing."""
    scaled, transposed = (vectors * gain).to(matrix.dtype), vectors.to(matrix.dtype).mT
    most = 2 * len(gain) > len(vectors)  # then the long side is multiplied once: that is less than twice by few
    if matrix.shape[0] > matrix.shape[1]:
        return matrix @ (scaled @ transposed) if most else matrix @ scaled @ transposed
    return scaled @ transposed @ matrix if most else scaled @ (transposed @ matrix)


@dataclass
class Nuclear(WithDim):
    """s·Σσ (nuclear norm): the convex way to low rank.

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

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        threshold = step * self.strength

        def gains(sigma: Tensor) -> Tensor:
            return torch.where(sigma <= threshold, 0.0, (sigma - threshold) / sigma)

        return scale_singular_values(x, self.dim, gains, out)


@dataclass
class Rank(WithDim, Constraint):
    """The matrices of at most the given rank.

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
    """The matrices with Σσ ≤ radius: low rank as a constraint.

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
            kept = project_simplex(groups.elements, self.radius, groups)
            outside = torch.where(sigma == 0, 0.0, kept / sigma)
            return torch.where(sigma.sum() <= self.radius, 1.0, outside)

        return scale_singular_values(x, self.dim, gains, out)
