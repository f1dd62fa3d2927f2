"""The prox of one row, compiled by numba, for each group penalty.

A row is a group: everything with one index along the first axis (`dim=0`), or the whole tensor (`dim=None`). Functions
(target, source, c, peaks) write the prox of the row ``source`` to ``target``, which may be the same; c are the
constants of `Penalty.kernel`, and ``peaks`` is memory for one number per block of the row.

Each block is summed in the precision of the row and the blocks in float64, so that long rows lose no digits. Thresholds
are found as in `proxmo.penalties.thresholds`; blocks with nothing above a level are skipped. Indices are written as the
start of a block plus a count from 0: if LLVM cannot see that an index is non-negative (in Python negative ones count
from the end), it gathers elements one by one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from proxmo.kernels.tasks import BLOCK, from_ordered, inlined, keep, ordered, reordered, write
from proxmo.penalties.compiled_elements import clamp, soft

MAX_PASSES = 100  # Newton's method takes 4 to 10


@inlined
def _identity(x: Any) -> Any:
    return x


def _summing(read: Any) -> Any:
    @reordered
    def sum_and_largest(row: Any, peaks: Any) -> Any:
        """Σ read(x) and the largest read(x), of each block too; NaN is not counted there, and makes the sum NaN."""
        total: Any = 0.0
        top: Any = ordered(read(row[0]))
        for block in range(len(peaks)):
            start = block * BLOCK
            part, largest = row.dtype.type(0), ordered(read(row[start]))
            for i in range(min(BLOCK, len(row) - start)):
                value = read(row[start + i])
                part += value
                largest = max(largest, ordered(value))
            peaks[block] = from_ordered(largest)
            top = max(top, largest)
            total += part
        return total, from_ordered(top)

    return sum_and_largest


@reordered
def _low_level(peaks: Any, length: int, total: float, top: Any, radius: Any) -> float:
    """A θ that is not above the one looked for: that of all elements, of the largest alone, or of peaks alone."""
    theta = -float(radius)
    if total < np.inf:  # not an overflow
        mean = total / length - top
        rounding = (BLOCK + len(peaks)) * np.finfo(peaks.dtype).eps * (abs(top) - mean)  # of the sum
        theta = max(mean - rounding - radius / length, theta)
    for _ in range(MAX_PASSES if len(peaks) > 1 else 0):
        reached, count = 0.0, 0.0
        for peak in peaks:
            excess = (float(peak) - top) - theta
            reached += excess if excess > 0 else 0.0
            count += 1.0 if excess > 0 else 0.0
        rise = (reached - radius) / count
        if not rise > -0.01 * theta:  # near enough
            break
        theta += rise
    return theta


def _levels(read: Any, signed: Any) -> Any:
    """How to find levels of read(x), and to project onto what they bound; ``signed`` gives a result the sign of x."""

    @reordered
    def above(row: Any, peaks: Any, top: Any, level: Any) -> Any:
        """Σ max(read(x) − top − level, 0), and how many elements are above."""
        zero, one = row.dtype.type(0), row.dtype.type(1)
        reached, count = 0.0, 0.0
        for block in range(len(peaks)):
            if (peaks[block] - top) - level <= zero:
                continue
            start = block * BLOCK
            part, active = zero, zero
            for i in range(min(BLOCK, len(row) - start)):
                excess = (read(row[start + i]) - top) - level
                part += excess if excess > zero else zero
                active += one if excess > zero else zero
            reached += part
            count += active
        return reached, count

    @inlined
    def find_level(row: Any, peaks: Any, total: Any, top: Any, radius: Any, settle: bool) -> Any:
        """θ ≤ 0 with Σ max(read(x) − top − θ, 0) = radius, and what is missing for each element that is above it.

        To settle is to count what is above θ by no more than its rounding as not above, and then to measure what is
        missing; as in `proxmo.penalties.thresholds.project_simplex`.
        """
        theta, before, settled = _low_level(peaks, len(row), total, top, radius), np.inf, False
        for _ in range(MAX_PASSES):
            level = row.dtype.type(theta)
            reached, count = above(row, peaks, top, level)
            missing = (radius - reached) / max(count, 1.0)
            theta = level - missing
            if settled or (count >= before and not settle):
                break
            if count >= before:  # of a level from below; rounding may raise it
                theta, settled = row.dtype.type(theta) * (1.0 - np.finfo(row.dtype).eps), True
            before = count
        return (level if settle else row.dtype.type(theta)), row.dtype.type(missing)

    @inlined
    def lower(x: Any, c: Any) -> Any:
        top, level, share = c
        excess, zero = (read(x) - top) - level, top - top
        return signed(max(excess + share, zero), x) if excess > zero else zero

    return find_level, lower


_sum_of_magnitudes, _sum_of_values = _summing(abs), _summing(_identity)
_level_of_magnitudes, _lower_magnitude = _levels(abs, math.copysign)
_level_of_values, _lower_value = _levels(_identity, keep)


@inlined
def _norm(row: Any, peaks: Any) -> float:
    """‖row‖₂; where squares might overflow or vanish, it is scaled by the largest magnitude."""
    tiny, huge = float(np.finfo(row.dtype).tiny), float(np.finfo(row.dtype).max)
    squares = _sum_of_squares(row, row.dtype.type(1))
    if len(row) * tiny / np.finfo(row.dtype).eps < squares < huge:
        return math.sqrt(squares)
    total, largest = _sum_of_magnitudes(row, peaks)
    if math.isnan(total) or not 0 < largest < np.inf:
        return total if math.isnan(total) else float(largest)
    return math.sqrt(_sum_of_squares(row, largest)) * float(largest)


@reordered
def _sum_of_squares(row: Any, unit: Any) -> float:
    total = 0.0
    for block in range(-(-len(row) // BLOCK)):
        start = block * BLOCK
        part = row.dtype.type(0)
        if unit == 1:
            for i in range(min(BLOCK, len(row) - start)):
                part += row[start + i] * row[start + i]
        else:
            for i in range(min(BLOCK, len(row) - start)):
                scaled = row[start + i] / unit
                part += scaled * scaled
        total += part
    return total


@inlined
def cap(target: Any, source: Any, c: Any, peaks: Any) -> None:
    total, top = _sum_of_magnitudes(source, peaks)
    if total <= c[0]:
        target[:] = 0
    elif math.isnan(total) or top == np.inf:
        target[:] = np.nan
    else:
        theta, _ = _level_of_magnitudes(source, peaks, total, top, c[0], False)
        zero = source.dtype.type(0)
        level = max(top + theta, zero)
        write(target, source, clamp, (zero - level, level))  # 0 − 0 is 0 where −0 would be -0.0


@inlined
def simplex(target: Any, source: Any, c: Any, peaks: Any) -> None:
    total, top = _sum_of_values(source, peaks)
    if math.isnan(total) and not np.isnan(source).any():  # sums overflowed to both sides
        total = np.inf
    if math.isnan(total) or top == np.inf:  # −inf is far below every level
        target[:] = np.nan
    else:
        level, share = _level_of_values(source, peaks, total, top, c[0], True)
        write(target, source, _lower_value, (top, level, share))


@inlined
def l1_ball(target: Any, source: Any, c: Any, peaks: Any) -> None:
    total, top = _sum_of_magnitudes(source, peaks)
    if total <= c[0]:
        write(target, source, keep, c)
    elif math.isnan(total) or top == np.inf:
        target[:] = np.nan
    else:
        level, share = _level_of_magnitudes(source, peaks, total, top, c[0], True)
        write(target, source, _lower_magnitude, (top, level, share))


@inlined
def _times(x: Any, c: Any) -> Any:
    return x * c[0]


@inlined
def shrink(target: Any, source: Any, c: Any, peaks: Any) -> None:
    norm = _norm(source, peaks)
    if norm <= c[0]:
        target[:] = 0
    else:
        write(target, source, _times, (source.dtype.type((norm - c[0]) / norm),))


@inlined
def soft_then_shrink(target: Any, source: Any, c: Any, peaks: Any) -> None:
    write(target, source, soft, (c[1],))
    shrink(target, target, c, peaks)


@inlined
def _onto_sphere(x: Any, c: Any) -> Any:
    return x / c[0] * c[1]


@inlined
def l2_ball(target: Any, source: Any, c: Any, peaks: Any) -> None:
    norm = _norm(source, peaks)
    if norm <= c[0]:
        write(target, source, keep, c)
    else:
        write(target, source, _onto_sphere, (norm, float(c[0])))
