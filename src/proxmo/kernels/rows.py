"""The prox of one row, for each group penalty: what compiled loops apply to rows while they are in cache.

A row is a group: all that shares its index along the first axis, `dim=0`, or the whole tensor, `dim=None`. Sums run in
blocks, each in the precision of the row and all of them in float64, so that long rows lose no digits. Thresholds are
found as in `proxmo.penalties.thresholds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from proxmo.kernels.compiled import REORDERED
from proxmo.penalties.base import Penalty
from proxmo.penalties.constraints import L1Ball, L2Ball, Simplex
from proxmo.penalties.groups import GroupL2, GroupLInf, SparseGroup

BLOCK = 512
MOST_PASSES = 100  # of Newton's method, which takes 4 to 10
compiled = njit(error_model="numpy", fastmath=REORDERED)
inlined = njit(inline="always")


class Rows(NamedTuple):
    """A compiled function (row, constants) that writes the prox into the row, and the constants of penalty and step."""

    prox: Any
    constants: Callable[[Any, float], tuple[float, ...]]


@inlined
def _as_it_is(x: Any) -> Any:
    return x


def _summing(read: Any) -> Any:
    @compiled
    def sum_and_largest(row: Any) -> Any:
        """Σ read(x) and the largest read(x), where NaN is not counted; a NaN makes the sum NaN."""
        total, largest = 0.0, read(row[0])
        for start in range(0, len(row), BLOCK):
            part = row.dtype.type(0)
            for i in range(start, min(start + BLOCK, len(row))):
                value = read(row[i])
                part += value
                largest = value if value > largest else largest
            total += part
        return total, largest

    return sum_and_largest


def _levels(read: Any) -> Any:
    @compiled
    def level_below_top(row: Any, total: Any, top: Any, radius: Any) -> Any:
        """θ ≤ 0 with Σ max(read(x) − top − θ, 0) = radius, and how many elements are above."""
        zero, one = row.dtype.type(0), row.dtype.type(1)
        theta = -float(radius)
        if total < np.inf:  # not an overflow
            theta = max((total - len(row) * float(top) - radius) / len(row), theta)
        before = -1.0
        for _ in range(MOST_PASSES):
            level = row.dtype.type(theta)
            reached, count = 0.0, 0.0
            for start in range(0, len(row), BLOCK):
                part, active = zero, zero
                for i in range(start, min(start + BLOCK, len(row))):
                    excess = (read(row[i]) - top) - level
                    part += excess if excess > zero else zero
                    active += one if excess > zero else zero
                reached += part
                count += active
            theta = level + (reached - radius) / max(count, 1.0)
            if count == before:
                break
            before = count
        return row.dtype.type(theta), before

    return level_below_top


_sum_of_magnitudes, _level_of_magnitudes = _summing(abs), _levels(abs)
_sum_of_values, _level_of_values = _summing(_as_it_is), _levels(_as_it_is)


@compiled
def _norm(row: Any) -> float:
    """‖row‖₂; where squares might overflow or vanish, it is scaled by the largest magnitude."""
    tiny, huge = float(np.finfo(row.dtype).tiny), float(np.finfo(row.dtype).max)
    squares = _sum_of_squares(row, row.dtype.type(1))
    if len(row) * tiny / np.finfo(row.dtype).eps < squares < huge:
        return math.sqrt(squares)
    total, largest = _sum_of_magnitudes(row)
    if math.isnan(total) or not 0 < largest < np.inf:
        return total if math.isnan(total) else float(largest)
    return math.sqrt(_sum_of_squares(row, largest)) * float(largest)


@compiled
def _sum_of_squares(row: Any, unit: Any) -> float:
    total = 0.0
    for start in range(0, len(row), BLOCK):
        part = row.dtype.type(0)
        if unit == 1:
            for i in range(start, min(start + BLOCK, len(row))):
                part += row[i] * row[i]
        else:
            for i in range(start, min(start + BLOCK, len(row))):
                scaled = row[i] / unit
                part += scaled * scaled
        total += part
    return total


@compiled
def _cap(row: Any, c: Any) -> None:
    total, top = _sum_of_magnitudes(row)
    if total <= c[0]:
        row[:] = 0
    elif math.isnan(total) or top == np.inf:
        row[:] = np.nan
    else:
        theta, _ = _level_of_magnitudes(row, total, top, c[0])
        level = max(top + theta, row.dtype.type(0))
        for i in range(len(row)):
            x = row[i]
            row[i] = level if x > level else (-level if x < -level else x)


@inlined
def _rounding(row: Any, theta: Any) -> Any:
    """What is above a level by no more is not above it, as in `proxmo.penalties.thresholds.project_simplex_`."""
    return -theta * row.dtype.type(np.finfo(row.dtype).eps)


@compiled
def _simplex(row: Any, c: Any) -> None:
    total, top = _sum_of_values(row)
    if math.isnan(total) or top == np.inf:  # −inf is far below every level
        row[:] = np.nan
        return
    theta, _ = _level_of_values(row, total, top, c[0])
    zero, rounding = row.dtype.type(0), _rounding(row, theta)
    for i in range(len(row)):
        above = (row[i] - top) - theta
        row[i] = above if above > rounding else zero
    _share_out(row, c[0])


@compiled
def _l1_ball(row: Any, c: Any) -> None:
    total, top = _sum_of_magnitudes(row)
    if total <= c[0]:
        return
    if math.isnan(total) or top == np.inf:
        row[:] = np.nan
        return
    theta, _ = _level_of_magnitudes(row, total, top, c[0])
    zero, rounding = row.dtype.type(0), _rounding(row, theta)
    for i in range(len(row)):
        above = (abs(row[i]) - top) - theta
        row[i] = math.copysign(above, row[i]) if above > rounding else zero
    _share_out(row, c[0])


@compiled
def _share_out(row: Any, radius: Any) -> None:
    """The error of rounding a level enters each element, and elements have finer digits: share out what is missing."""
    reached, count = 0.0, 0.0
    zero, one = row.dtype.type(0), row.dtype.type(1)
    for start in range(0, len(row), BLOCK):
        part, active = zero, zero
        for i in range(start, min(start + BLOCK, len(row))):
            part += abs(row[i])
            active += one if row[i] != zero else zero
        reached += part
        count += active
    share = row.dtype.type((radius - reached) / max(count, 1.0))
    for i in range(len(row)):
        if row[i] != zero:
            row[i] = math.copysign(max(abs(row[i]) + share, zero), row[i])


@compiled
def _scale(row: Any, gain: Any) -> None:
    for i in range(len(row)):
        row[i] *= gain


@compiled
def _shrink(row: Any, c: Any) -> None:
    norm = _norm(row)
    if norm <= c[0]:
        row[:] = 0
    else:
        _scale(row, row.dtype.type((norm - c[0]) / norm))


@compiled
def _soft_then_shrink(row: Any, c: Any) -> None:
    for i in range(len(row)):
        row[i] = row[i] - row[i] if abs(row[i]) <= c[1] else row[i] - math.copysign(c[1], row[i])
    _shrink(row, c)


@compiled
def _l2_ball(row: Any, c: Any) -> None:
    norm = _norm(row)
    if not norm <= c[0]:
        for i in range(len(row)):
            row[i] = row.dtype.type(row[i] / norm * c[0])


ROWS: dict[type[Penalty], Rows] = {
    GroupL2: Rows(_shrink, lambda p, step: (step * p.strength,)),
    GroupLInf: Rows(_cap, lambda p, step: (step * p.strength,)),
    SparseGroup: Rows(_soft_then_shrink, lambda p, step: (step * p.group, step * p.l1)),
    L1Ball: Rows(_l1_ball, lambda p, step: (p.radius,)),
    L2Ball: Rows(_l2_ball, lambda p, step: (p.radius,)),
    Simplex: Rows(_simplex, lambda p, step: (p.radius,)),
}
