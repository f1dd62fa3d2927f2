"""The root-finders below group penalties and constraints.

ℓ∞,1, the ℓ1 ball, the simplex and the nuclear ball need, for each group y, the level τ at which what rises above it
adds up to a given radius:

    Σ max(y − τ, 0) = radius.

The sum is convex, decreasing and piecewise linear in τ, so Newton's method from below climbs monotonically and ends
exactly, as soon as no element drops out of the sum (Michelot 1986), mostly in 4 to 10 passes over all groups at once,
with one buffer besides y. For short rows or few elements a sort is faster; it also has no loop that depends on the
data, which `torch.compile` could not trace. Where the elements of a group are sharded, only Newton will do: each pass
all-reduces two or three numbers per group.

Levels are measured from the top of each group, as depths d = max(y) − τ ≥ 0: differences of close numbers are exact in
floating point, so digits survive even where the radius is tiny beside the entries.

A step that differs between elements makes it Σ max(y − θ·step, 0) = radius. This θ is not measured from a top:
quotients y/step over many decades have no digits in common.

ℓ2,1 and the ℓ2 ball have closed forms for one step per group. Otherwise they need the root of ‖y/(a + θ·step)‖₂ = 1.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from proxmo.checks import FLOATING
from proxmo.eager import is_eager_cpu, is_transformed
from proxmo.penalties.axes import Groups, Step, as_rows

Number = TypeVar("Number", bound=float | Tensor)
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in FLOATING}
_EPS = {dtype: torch.finfo(dtype).eps for dtype in FLOATING}
# Measured on a CPU: below either bound the sort wins, at both it is a draw.
_SHORT_ROW = 32
_FEW_ELEMENTS = 1 << 16
_FEW_ROUNDINGS = 16  # up to this group length the rounding errors of a sum are negligible
LEAST = {torch.float64: 1e-200, torch.float32: 1e-30}  # stands for zero beside 1; its reciprocal can be summed
_NEWTON_STEPS = 100  # it takes 4 to 8; steps over 60 decades take 35, over 200 decades 76
_RECORDED_STEPS = 60  # of a loop that is unrolled
_MODERATE = 1e12


def fit(value: Number, dtype: torch.dtype) -> Number:
    """Clamp to the finite range of ``dtype``: torch refuses numbers beyond it, and infinite entries stay above it."""
    largest = _LARGEST[dtype]
    if isinstance(value, Tensor):
        return value.clamp(-largest, largest)  # type: ignore[return-value]
    return value if -largest <= value <= largest else math.copysign(largest, value)  # type: ignore[return-value]


def widest(x: Tensor) -> Tensor:
    """Return ``x`` in float64, where the device has it: a step for every element leaves few digits in float32."""
    return x if x.device.type == "mps" else x.double()


def is_moderate(step: Tensor, largest: Tensor | None = None) -> bool:
    """Whether steps are known to be between 1e-12 and 1e12, and finite numbers below 1e12: float32 has digits for them.

    ``largest`` holds the largest magnitude of each group, which may be NaN or inf.
    """
    if (
        not is_eager_cpu(step)
        or not step.numel()
        or not 1 / _MODERATE < float(step.amin()) <= float(step.amax()) < _MODERATE
    ):
        return False
    if largest is None:
        return True
    finite = torch.where(largest.isfinite(), largest, 0.0)
    top = float(finite.amax()) if finite.numel() else 0.0
    return top < _MODERATE and top**2 < 1e36 * float(step.amin()) ** 3  # (x/step)²/step is summed


def project_simplex(y: Tensor, radius: float, groups: Groups, step: Tensor | None = None) -> Tensor:
    """Return max(y − τ, 0) for each group, the nearest point of the simplex {u ≥ 0, Σu = radius}; overwrites ``y``.

    An element above τ by no more than its rounding (in short groups: than that of the radius) counts as not above, so
    that zeros stay zero when they are projected again. A step for every element makes it max(y − θ·step, 0).
    """
    radius, eps = fit(radius, y.dtype), _EPS[y.dtype]
    if step is not None:
        return _project_simplex_in_metric(y, radius, groups, step)
    below = y.sub_(groups.amax(y))
    depth = _depth(below, radius, groups)
    if groups.length <= _FEW_ROUNDINGS:
        return torch.threshold_(below.add_(depth), eps * radius, 0.0)
    active = below.add_(depth * (1 - eps)).relu_().sign()
    # The rounding error of τ enters each element. The elements have finer digits than τ: share out what is missing.
    reached, count = groups.sum_over_ranks(_sum(below, groups), _sum(active, groups))
    share = (radius - reached) / count.clamp(min=1)
    return below.add_(active.mul_(share)).relu_()


def _project_simplex_in_metric(y: Tensor, radius: float, groups: Groups, step: Tensor) -> Tensor:
    above = y - level_in_metric(y, radius, groups, step) * step
    active = (above > _EPS[y.dtype] * y.abs()).to(y.dtype)
    above.mul_(active)
    reached, mass = groups.sum_over_ranks(_sum(above, groups), _sum(step * active, groups))
    share = (radius - reached) / mass.clamp(min=LEAST[y.dtype])
    return above.add_(active.mul_(step).mul_(share)).relu_()


def level_in_metric(y: Tensor, radius: float, groups: Groups, step: Tensor) -> Tensor:
    """Return the θ of each group with Σ max(y − θ·step, 0) = radius, for ``step`` > 0.

    Any set of elements gives a lower bound of θ, the one at which the set alone makes the radius. The largest of these
    is θ itself. So it is never lowered, even if rounding hides that an element with a large step is above.
    """
    if _is_recorded(y) and not groups.sharded:
        return _level_by_sort(y, radius, groups, step)
    theta = groups.amax((y - radius) / step)  # from sets of one element
    if is_moderate(step) and not groups.sharded:
        return _level_by_newton(y, radius, groups, step, theta)
    active, before = torch.ones_like(y), torch.full_like(theta, math.inf)
    while True:
        active = active * (y > theta * step)  # elements only drop out, so this ends
        sums = [_sum(part, groups) for part in (y * active, step * active, active)]
        reached, mass, count = groups.sum_over_ranks(*sums)
        theta = torch.maximum(theta, (reached - radius) / mass.clamp(min=LEAST[y.dtype]))
        if not bool((count < before).any()):
            return theta
        before = count


def _level_by_newton(y: Tensor, radius: float, groups: Groups, step: Tensor, theta: Tensor) -> Tensor:
    """Do the same for steps of similar size without masks, which take ten times as long as sums."""
    theta = torch.maximum(theta, (_sum(y, groups) - radius) / _sum(step, groups))
    work = torch.empty_like(y)
    for _ in range(_NEWTON_STEPS):
        above = torch.sub(y, torch.mul(step, theta, out=work), out=work).relu_()
        reached = _sum(above, groups)
        mass = _sum(above.sign_().mul_(step), groups)
        higher = theta + ((reached - radius) / mass).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0)
        if not bool((higher > theta + 4 * _EPS[y.dtype] * theta.abs()).any()):
            break
        theta = higher
    return theta


def _level_by_sort(y: Tensor, radius: float, groups: Groups, step: Tensor) -> Tensor:
    """Do the same without a loop, by the sets of the k elements of largest y/step."""
    rows, steps = as_rows(y, groups.axes), as_rows(step, groups.axes)
    order = (rows / steps).argsort(dim=-1, descending=True)
    theta = (rows.gather(-1, order).cumsum(-1) - radius) / steps.gather(-1, order).cumsum(-1)
    return theta.amax(-1).reshape(groups.reduced_shape)


def cap(magnitudes: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """Return the level τ ≥ 0 per group above which ``magnitudes`` ≥ 0 add up to ``radius``; 0 if all of them do not.

    Overwrites ``magnitudes``.
    """
    radius = fit(radius, magnitudes.dtype)
    vanishes = groups.sum(magnitudes) <= radius  # false for NaN, which stays in its group
    top = groups.amax(magnitudes)
    depth = _depth(magnitudes.sub_(top), radius, groups)
    return (top - depth).relu_().masked_fill_(vanishes, 0)


def _is_recorded(x: Tensor) -> bool:
    """Whether loops that depend on the data must be avoided."""
    return torch.compiler.is_compiling() or is_transformed(x)


def _sum(values: Tensor, groups: Groups) -> Tensor:
    """Return the sum over the local elements of each group."""
    return values.sum(groups.axes, keepdim=True)


def _depth(below: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """Return how far the level of each group lies under its top, from which ``below`` ≤ 0 is measured."""
    few = groups.length <= _SHORT_ROW or below.numel() <= _FEW_ELEMENTS
    if not groups.sharded and (few or _is_recorded(below)):
        return _depth_by_sort(below, radius, groups)
    return _depth_by_newton(below, radius, groups)


def _depth_by_sort(below: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    """Return the least of the depths at which the k largest elements alone make the radius."""
    gaps = as_rows(below, groups.axes).neg()
    if is_eager_cpu(gaps):
        gaps.numpy().sort()  # several times faster than torch's sort, which also keeps track of indices
    else:
        gaps = gaps.sort(dim=-1).values
    sums = gaps.cumsum(-1)
    sums += radius.reshape(*gaps.shape[:-1], 1) if isinstance(radius, Tensor) and radius.dim() else radius
    ranks = torch.arange(1, gaps.shape[-1] + 1, dtype=gaps.dtype, device=gaps.device)
    depth = sums.div_(ranks).amin(-1).reshape(groups.reduced_shape)
    # Compiled sums are not taken in float64; Newton's method corrects their rounding.
    if torch.compiler.is_compiling():
        depth, _ = _newton_step(below, radius, groups, depth, torch.empty_like(below))
    return depth


def _newton_step(
    below: Tensor, radius: float | Tensor, groups: Groups, depth: Tensor, work: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next depth, and the number of elements above the present one."""
    above = torch.add(below, depth, out=work).relu_()
    reached, count = groups.sum_over_ranks(_sum(above, groups), _sum(above.sign_(), groups))
    return depth - (reached - radius) / count.clamp(min=1), count


def _depth_by_newton(below: Tensor, radius: float | Tensor, groups: Groups) -> Tensor:
    work = torch.empty_like(below)
    # Two bounds from above: the depth with all elements active, and with the largest active alone.
    depth = torch.minimum((radius - groups.sum(below)) / groups.length, below.new_ones(()) * radius)
    active = torch.full_like(depth, math.inf)
    while True:
        depth, fewer = _newton_step(below, radius, groups, depth, work)
        if not bool((fewer < active).any()):  # false for NaN, so it cannot keep the loop going
            return depth
        active = torch.minimum(active, fewer)  # rounding must not bring elements back, or groups might take turns


def secular_root(y: Tensor, a: Step, step: Step, groups: Groups) -> Tensor:
    """Return θ ≥ 0 with ‖y/(a + θ·step)‖₂ = 1 for each group, for y ≥ 0, a and step > 0; 0 if the norm is ≤ 1 at 0.

    Newton's method on 1/‖y/(a + θ·step)‖ − 1, which is concave and increasing, rises monotonically from below.
    """
    # 1/t² is convex in t, so the mean of a + θ·step, weighted by y², is at least ‖y‖ at the root.
    weights = y.square()
    sums = [_sum(weights * factor, groups) for factor in (1.0, a, step)]
    squares, of_a, of_step = groups.sum_over_ranks(*sums)
    theta = torch.where(squares > 0, (squares.sqrt() - of_a / squares) * (squares / of_step), squares)  # NaN stays
    if y.dtype == torch.float64:  # over many decades each element alone gives a better bound
        theta = torch.maximum(theta, groups.amax((y - a) / step))
    theta, recorded = theta.clamp_(min=0), _is_recorded(y)
    for _ in range(_RECORDED_STEPS if recorded else _NEWTON_STEPS):
        total = a + theta * step
        ratios = (y / total).square_()
        squares, slopes = groups.sum_over_ranks(_sum(ratios, groups), _sum(ratios.mul_(step).div_(total), groups))
        rise = ((squares.sqrt() - 1) * squares / slopes).nan_to_num_(nan=0.0, posinf=0.0)
        before, theta = theta, (theta + rise).clamp_(min=0)  # from above, where rounding may start, it leads below
        if not recorded and not bool(((theta - before).abs() > 4 * _EPS[y.dtype] * theta).any()):
            break
    return theta
