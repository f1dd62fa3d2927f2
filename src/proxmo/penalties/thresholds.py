"""The one root-finder below ℓ∞,1, the ℓ1 ball, the simplex and the nuclear ball.

All four need, for each group y, the level τ at which what rises above it adds up to a given radius:

    Σ max(y − τ, 0) = radius.

The sum is convex, decreasing and piecewise linear in τ, so Newton's method from below climbs monotonically and ends
exactly, as soon as no element falls out of the sum any more (Michelot 1986), mostly in 4 to 10 passes over all groups
at once, in one buffer more than y. For short rows or few elements a sort is faster; it also has no loop that depends on
the data, which `torch.compile` could not trace. Where processes share the elements of a group only Newton will do: each
pass adds up two numbers per group over the processes.

Levels are measured from the top of each group, θ = τ − max(y) ≤ 0: differences of close numbers are exact in floating
point, so digits survive even where the radius is tiny beside the entries.
"""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

from proxmo.checks import FLOATING
from proxmo.parts import is_at_hand
from proxmo.penalties.axes import Groups, as_rows

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in FLOATING}
# Measured on a CPU: below either bound the sort wins, at both it is a draw.
_SHORT_ROW = 32
_FEW_ELEMENTS = 1 << 16
_FEW_ROUNDINGS = 16  # do not add up to much


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


def project_simplex_(y: Tensor, radius: float, groups: Groups) -> Tensor:
    """Turn each group of ``y`` into max(y − τ, 0), the nearest point of the simplex {u ≥ 0, Σu = radius}.

    What is above τ by no more than its rounding is not above it: so zeros stay zeros when they are projected again.
    """
    radius = fit(radius, y.dtype)
    _, level = _measure_from_top_(y, radius, groups)
    rounding = level * -torch.finfo(y.dtype).eps
    active = y.sub_(level + rounding).relu_().sign()
    if groups.length <= _FEW_ROUNDINGS:
        return y.add_(active.mul_(rounding))
    # The error of rounding τ enters each element. The elements have finer digits than τ: share out what is missing.
    reached, count = groups.add_up(y.sum(groups.axes, keepdim=True), active.sum(groups.axes, keepdim=True))
    share = (radius - reached) / count.clamp(min=1)
    return y.add_(active.mul_(share)).relu_()


def cap(magnitudes: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """The level τ ≥ 0 per group above which ``magnitudes`` ≥ 0 add up to ``radius``; 0 where they do not in all.

    The magnitudes are written over.
    """
    radius = fit(radius, magnitudes.dtype)
    vanishes = groups.sum(magnitudes) <= radius  # false for NaN, which so stays in its group
    top, level = _measure_from_top_(magnitudes, radius, groups)
    return (top + level).relu_().masked_fill_(vanishes, 0)


def _measure_from_top_(y: Tensor, radius: float | Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The largest element of each group, and θ ≤ 0 with Σ max(y − θ, 0) = radius once it is subtracted from ``y``."""
    compiling = torch.compiler.is_compiling()
    small = groups.length <= _SHORT_ROW or y.numel() <= _FEW_ELEMENTS
    if groups.divided or not (small or compiling):
        top = groups.amax(y)
        y.sub_(top)
        return top, _level_by_newton(y, radius, groups)
    rows = as_rows(y, groups.axes)
    top, level = _level_by_sort(rows, radius)
    if rows is not y:
        shape = [1 if axis in groups.axes else size for axis, size in enumerate(y.shape)]
        top, level = top.reshape(shape), level.reshape(shape)
    y.sub_(top)
    if compiling:  # compiled sums are not taken in float64, and a step of Newton's method mends their rounding
        level, _ = _newton_step(y, radius, groups, level, torch.empty_like(y))
    return top, level


def _level_by_sort(rows: Tensor, radius: float | Tensor) -> tuple[Tensor, Tensor]:
    """The largest element of each row, and the highest of the levels at which the k largest alone make the radius."""
    ascending = _sorted(rows.neg())
    bottom = ascending[..., :1].clone()
    ranks = torch.arange(1, rows.shape[-1] + 1, dtype=rows.dtype, device=rows.device)
    depths = ascending.sub_(bottom).cumsum(-1).add_(radius).div_(ranks)
    return bottom.neg_(), depths.amin(-1, keepdim=True).neg_()


def _sorted(rows: Tensor) -> Tensor:
    """In ascending order along the last axis; ``rows`` may be written over."""
    if not is_at_hand(rows):
        return rows.sort(dim=-1).values
    rows.numpy().sort()  # several times faster than torch, which keeps track of indices as well
    return rows


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
