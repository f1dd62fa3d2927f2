"""The one root-finder below ℓ∞,1, the ℓ1 ball, the simplex and the nuclear ball.

All four need, for each group y, the level τ at which what rises above it adds up to a given radius:

    Σ max(y − τ, 0) = radius.

The sum is convex, decreasing and piecewise linear in τ, so Newton's method from below climbs monotonically and ends
exactly, as soon as no element falls out of the sum any more (Michelot 1986), mostly in 4 to 10 passes over all groups
at once. For short rows or few elements a sort is faster; it also has no loop that depends on the data, which
`torch.compile` could not trace.

Levels are measured from the top of each group, θ = τ − max(y) ≤ 0: differences of close numbers are exact in floating
point, so digits survive even where the radius is tiny beside the entries.
"""

from __future__ import annotations

from math import prod
from typing import overload

import torch
from torch import Tensor

from proxmo.penalties.axes import as_rows

# Measured on a CPU: below either bound the sort wins, at both it is a draw.
_SHORT_ROW = 16
_FEW_ELEMENTS = 8192


@overload
def fit(value: float, dtype: torch.dtype) -> float: ...


@overload
def fit(value: float | Tensor, dtype: torch.dtype) -> float | Tensor: ...


def fit(value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """``value`` within the finite range of ``dtype``: torch refuses numbers beyond it as arguments; tensors may be."""
    if isinstance(value, Tensor):
        return value
    limit = torch.finfo(dtype).max
    return min(max(value, -limit), limit)


def project_simplex(y: Tensor, radius: float | Tensor, axes: tuple[int, ...]) -> Tensor:
    """max(y − τ, 0), the point of the simplex {u ≥ 0, Σu = radius} nearest to each group of ``y``."""
    radius = fit(radius, y.dtype)
    below_top = y - y.amax(axes, keepdim=True)
    result = below_top.sub_(_level(below_top, radius, axes)).relu_()
    # The error of rounding τ enters each element. The elements have finer digits than τ: share out what is missing.
    active = result.sign()
    missing = radius - result.sum(axes, keepdim=True)
    share = missing / active.sum(axes, keepdim=True).clamp_(min=1)
    return result.add_(active.mul_(share)).relu_()


def cap(magnitudes: Tensor, radius: float | Tensor, axes: tuple[int, ...]) -> Tensor:
    """The level τ ≥ 0 per group above which ``magnitudes`` ≥ 0 add up to ``radius``; 0 where they do not in all."""
    radius = fit(radius, magnitudes.dtype)
    vanishes = magnitudes.sum(axes, keepdim=True) <= radius  # false for NaN, which so stays in its group
    top = magnitudes.amax(axes, keepdim=True)
    level = top + _level(magnitudes - top, radius, axes)
    return torch.where(vanishes, 0.0, level.clamp_(min=0))


def _level(y: Tensor, radius: float | Tensor, axes: tuple[int, ...]) -> Tensor:
    """θ ≤ 0 with Σ max(y − θ, 0) = radius for each group of ``y``, whose largest element is 0."""
    length = prod([y.shape[axis] for axis in axes])  # a list: torch.compile cannot trace a generator here
    if torch.compiler.is_compiling() or length <= _SHORT_ROW or y.numel() <= _FEW_ELEMENTS:
        return _newton_step(y, radius, axes, _level_by_sorting(y, radius, axes), torch.empty_like(y))[0]
    return _level_by_newton(y, radius, axes, length)


def _newton_step(
    y: Tensor, radius: float | Tensor, axes: tuple[int, ...], level: Tensor, work: Tensor
) -> tuple[Tensor, Tensor]:
    """The next level, and how many elements per group are above the present one."""
    above = torch.sub(y, level, out=work).relu_()
    excess = above.sum(axes, keepdim=True) - radius
    active = above.sign_().sum(axes, keepdim=True)
    return level + excess / active.clamp(min=1), active


def _level_by_newton(y: Tensor, radius: float | Tensor, axes: tuple[int, ...], length: int) -> Tensor:
    work = torch.empty_like(y)
    # Both bounds are below the root: the level with all elements active, and the one with only the largest.
    level = ((y.sum(axes, keepdim=True) - radius) / length).clamp_(min=-radius)
    level, active = _newton_step(y, radius, axes, level, work)
    while True:
        level, fewer = _newton_step(y, radius, axes, level, work)
        if not bool((fewer < active).any()):  # false for NaN, so it cannot keep the loop going
            return level
        active = fewer


def _level_by_sorting(y: Tensor, radius: float | Tensor, axes: tuple[int, ...]) -> Tensor:
    descending = as_rows(y, axes).sort(dim=-1, descending=True).values
    ranks = torch.arange(1, descending.shape[-1] + 1, dtype=y.dtype, device=y.device)
    levels = (descending.cumsum(-1) - radius) / ranks
    active = (descending > levels).sum(-1, keepdim=True).clamp(min=1)
    shape = [1 if axis in axes else size for axis, size in enumerate(y.shape)]
    return levels.gather(-1, active - 1).reshape(shape)
