"""The one root-finder below ℓ∞,1, the ℓ1 ball, the simplex and the nuclear ball.

All four need, for each group y, the level τ at which what rises above it adds up to a given radius:

    Σ max(y − τ, 0) = radius.

The sum is convex, decreasing and piecewise linear in τ, so Newton's method from below climbs monotonically and ends
exactly, as soon as no element falls out of the sum any more (Michelot 1986), mostly in 4 to 10 passes over all groups
at once. For short rows or few elements a sort is faster; it also has no loop that depends on the data, which
`torch.compile` could not trace. Where processes share the elements of a group only Newton will do: each pass adds up
two numbers per group over the processes.

Levels are measured from the top of each group, θ = τ − max(y) ≤ 0: differences of close numbers are exact in floating
point, so digits survive even where the radius is tiny beside the entries.
"""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

from proxmo.checks import FLOATING
from proxmo.penalties.axes import Groups, as_rows

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in FLOATING}
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
    limit = _LARGEST[dtype]
    return value if -limit <= value <= limit else math.copysign(limit, value)


def project_simplex(y: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """max(y − τ, 0), the point of the simplex {u ≥ 0, Σu = radius} nearest to each group of ``y``."""
    radius = fit(radius, y.dtype)
    below_top = y - groups.amax(y)
    result = below_top.sub_(_level(below_top, radius, groups)).relu_()
    # The error of rounding τ enters each element. The elements have finer digits than τ: share out what is missing.
    active = result.sign()
    reached, count = groups.add_up(result.sum(groups.axes, keepdim=True), active.sum(groups.axes, keepdim=True))
    share = (radius - reached) / count.clamp(min=1)
    return result.add_(active.mul_(share)).relu_()


def cap(magnitudes: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """The level τ ≥ 0 per group above which ``magnitudes`` ≥ 0 add up to ``radius``; 0 where they do not in all."""
    radius = fit(radius, magnitudes.dtype)
    vanishes = groups.sum(magnitudes) <= radius  # false for NaN, which so stays in its group
    top = groups.amax(magnitudes)
    level = top + _level(magnitudes - top, radius, groups)
    return torch.where(vanishes, 0.0, level.clamp_(min=0))


def _level(y: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """θ ≤ 0 with Σ max(y − θ, 0) = radius for each group of ``y``, whose largest element is 0."""
    small = groups.length <= _SHORT_ROW or y.numel() <= _FEW_ELEMENTS
    if not groups.divided and (small or torch.compiler.is_compiling()):
        return _newton_step(y, radius, groups, _level_by_sorting(y, radius, groups.axes), torch.empty_like(y))[0]
    return _level_by_newton(y, radius, groups)


def _newton_step(
    y: Tensor, radius: float | Tensor, groups: Groups, level: Tensor, work: Tensor
) -> tuple[Tensor, Tensor]:
    """The next level, and how many elements per group are above the present one."""
    above = torch.sub(y, level, out=work).relu_()
    reached = above.sum(groups.axes, keepdim=True)
    reached, active = groups.add_up(reached, above.sign_().sum(groups.axes, keepdim=True))
    return level + (reached - radius) / active.clamp(min=1), active


def _level_by_newton(y: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    work = torch.empty_like(y)
    # Both bounds are below the root: the level with all elements active, and the one with only the largest.
    level = ((groups.sum(y) - radius) / groups.length).clamp_(min=-radius)
    level, active = _newton_step(y, radius, groups, level, work)
    while True:
        level, fewer = _newton_step(y, radius, groups, level, work)
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
