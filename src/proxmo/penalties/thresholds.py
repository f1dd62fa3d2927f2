"""The one root-finder below ℓ∞,1, the ℓ1 ball, the simplex and the nuclear ball.

All four need, for each group y, the level τ at which what rises above it adds up to a given radius:

    Σ max(y − τ, 0) = radius.

The sum is convex, decreasing and piecewise linear in τ, so Newton's method from below climbs monotonically and ends
exactly, as soon as no element falls out of the sum any more (Michelot 1986), mostly in 4 to 10 passes over all groups
at once, in one buffer more than y. For short rows or few elements a sort is faster; it also has no loop that depends on
the data, which `torch.compile` could not trace. Where processes share the elements of a group only Newton will do: each
pass adds up two numbers per group over the processes.

Levels are measured from the top of each group, as depths d = max(y) − τ ≥ 0: differences of close numbers are exact in
floating point, so digits survive even where the radius is tiny beside the entries.
"""

from __future__ import annotations

import functools
import math
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxmo.checks import FLOATING
from proxmo.parts import is_at_hand
from proxmo.penalties.axes import Groups, as_rows

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in FLOATING}
_EPS = {dtype: torch.finfo(dtype).eps for dtype in FLOATING}
# Measured on a CPU: below either bound the sort wins, at both it is a draw.
_SHORT_ROW = 32
_FEW_ELEMENTS = 1 << 16
_FEW_ROUNDINGS = 16  # do not add up to much
_TINY_ROW = 8  # elements, below which the start of NumPy's quicksort takes longer than the stable sort does


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


def project_simplex(y: Tensor, radius: float, groups: Groups, *, in_place: bool = False) -> Tensor:
    """Each group as max(y − τ, 0), the nearest point of the simplex {u ≥ 0, Σu = radius}.

    What is above τ by no more than its rounding (in short groups: than that of the radius) is not above it: so zeros
    stay zeros when they are projected again.
    """
    radius, eps = fit(radius, y.dtype), _EPS[y.dtype]
    top = groups.amax(y)
    below = y.sub_(top) if in_place else y - top
    depth = _depth(below, radius, groups)
    if groups.length <= _FEW_ROUNDINGS:
        return torch.threshold_(below.add_(depth), eps * radius, 0.0)
    active = below.add_(depth * (1 - eps)).relu_().sign()
    # The error of rounding τ enters each element. The elements have finer digits than τ: share out what is missing.
    reached, count = groups.add_up(below.sum(groups.axes, keepdim=True), active.sum(groups.axes, keepdim=True))
    share = (radius - reached) / count.clamp(min=1)
    return below.add_(active.mul_(share)).relu_()


def cap(magnitudes: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """The level τ ≥ 0 per group above which ``magnitudes`` ≥ 0 add up to ``radius``; 0 where they do not in all.

    The magnitudes are written over.
    """
    radius = fit(radius, magnitudes.dtype)
    vanishes = groups.sum(magnitudes) <= radius  # false for NaN, which so stays in its group
    top = groups.amax(magnitudes)
    depth = _depth(magnitudes.sub_(top), radius, groups)
    return (top - depth).relu_().masked_fill_(vanishes, 0)


def _depth(below: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """How far the level of each group is under its top, from which ``below`` ≤ 0 is measured."""
    few = groups.length <= _SHORT_ROW or below.numel() <= _FEW_ELEMENTS
    sort = not groups.divided and (few or torch.compiler.is_compiling())
    return (_depth_by_sort if sort else _depth_by_newton)(below, radius, groups)


def _depth_by_sort(below: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """The least of the depths at which the k largest elements alone make the radius."""
    rows = as_rows(below, groups.axes)
    length, gaps = rows.shape[-1], rows.neg()
    if is_at_hand(gaps) and not isinstance(radius, Tensor):
        numbers = gaps.numpy()  # whose sort is several times faster than torch's, which keeps track of indices as well
        _sort_nonnegative(numbers)
        numbers[..., 0] += radius  # from where it gets into all sums
        sums, ranks = gaps.cumsum(-1), torch.from_numpy(_ranks(length, numbers.dtype))
    else:
        sums = gaps.sort(dim=-1).values.cumsum(-1).add_(radius)
        ranks = torch.arange(1, length + 1, dtype=rows.dtype, device=rows.device)
    depth = sums.div_(ranks).amin(-1, keepdim=True)
    if rows is not below:
        depth = depth.reshape([1 if axis in groups.axes else size for axis, size in enumerate(below.shape)])
    if torch.compiler.is_compiling():  # compiled sums are not taken in float64; Newton's method mends their rounding
        depth, _ = _newton_step(below, radius, groups, depth, torch.empty_like(below))
    return depth


def _sort_nonnegative(rows: NDArray[Any]) -> None:
    """Sort each row of numbers ≥ 0, or NaN, in place: their bits are integers in the same order, soon compared."""
    bits = rows.view(f"i{rows.itemsize}")
    bits.sort(kind="stable" if rows.shape[-1] < _TINY_ROW else None)


@functools.lru_cache(maxsize=8)
def _ranks(length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """1, 2, … Of short rows a prox is mostly calls, and this would be one in ten.

    Not kept as a tensor, which would remember the mode of torch that it was made in.
    """
    return np.arange(1, length + 1, dtype=dtype)


def _newton_step(
    below: Tensor, radius: float | Tensor, groups: Groups, depth: Tensor, work: Tensor
) -> tuple[Tensor, Tensor]:
    """The next depth, and how many elements per group are above the present one."""
    above = torch.add(below, depth, out=work).relu_()
    reached = above.sum(groups.axes, keepdim=True)
    reached, active = groups.add_up(reached, above.sign_().sum(groups.axes, keepdim=True))
    return depth - (reached - radius) / active.clamp(min=1), active


def _depth_by_newton(below: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    work = torch.empty_like(below)
    # Neither is below the root: the depth with all elements active, and the one with only the largest.
    depth = ((radius - groups.sum(below)) / groups.length).clamp_(max=radius)
    depth, active = _newton_step(below, radius, groups, depth, work)
    while True:
        depth, fewer = _newton_step(below, radius, groups, depth, work)
        if not bool((fewer < active).any()):  # false for NaN, so it cannot keep the loop going
            return depth
        active = fewer
