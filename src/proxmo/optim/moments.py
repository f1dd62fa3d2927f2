"""Second moments of gradients: one for each element, or one for each block of a penalty.

A block is the finest part on which one step keeps the prox simple: an element, a group, a unit that spans tensors, or
the whole tensor (`Penalty.block_shape`). Its second moment is the mean of the squared gradients in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from proxmo import shards
from proxmo.optim.options import Group
from proxmo.optim.units import Family, joined, units_of, write_back
from proxmo.penalties.base import widen

Metric = Literal["element", "block"]
METRICS = get_args(Metric)


class Moments(NamedTuple):
    """Parameters with their gradients, the moments to update with these, and how many gradients they have seen.

    A struct of lists, so that foreach kernels take them.
    """

    params: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    counts: list[Any]


def new_second_moment(group: Group, p: Tensor) -> Tensor:
    """Return zeros with one number for each element of a parameter, or for each of its blocks."""
    shape = _shape(group, p)
    return torch.zeros_like(widen(p.detach())) if shape == p.shape else shards.zeros_reduced(widen(p.detach()), shape)


def reduced_to_blocks(group: Group, p: Tensor, moment: Tensor) -> Tensor:
    """Return second moments of elements as means over blocks, if the group keeps one for each block."""
    if moment.shape != p.shape or _shape(group, p) == p.shape:
        return moment
    blocks = new_second_moment(group, p)
    return _sum_over_blocks(shards.local(moment), p, blocks) / (p.numel() // max(blocks.numel(), 1))


def _shape(group: Group, p: Tensor) -> tuple[int, ...]:
    penalty = group["penalty"]
    if penalty is None or (group["metric"] == "element" and penalty.elementwise_step):
        return tuple(p.shape)
    if not penalty.elementwise_step:
        return (1,) * p.dim()
    if group["units"] is None:
        return tuple(penalty.block_shape(p))
    axis = _axis_of_units(group, p)
    return tuple(p.shape) if axis is None else tuple(size if a == axis else 1 for a, size in enumerate(p.shape))


def _axis_of_units(group: Group, p: Tensor) -> int | None:
    """Return the axis of a parameter that runs over units; ``None`` if it has no part in any."""
    parts = (part for family in group["units"] for part in family if group["params"][part.position] is p)
    return next((part.axis for part in parts), None)


def update_second_moments(
    group: Group, params: list[Tensor], gradients: list[Tensor], moments: list[Tensor], weight: float
) -> None:
    """Set moment ← (1 − weight)·moment + weight·gradient², the mean over each block; ``gradients`` are local shards."""
    whole = [moment.shape == p.shape for moment, p in zip(moments, params, strict=True)]
    if all(whole):
        local = list(map(shards.local, moments))
        torch._foreach_mul_(local, 1 - weight)
        torch._foreach_addcmul_(local, gradients, gradients, weight)
        return
    sums = [_sum_over_blocks(g.square(), p, moment) for g, p, moment in zip(gradients, params, moments, strict=True)]
    lengths = [p.numel() // max(moment.numel(), 1) for p, moment in zip(params, moments, strict=True)]
    means = [total / length for total, length in zip(sums, lengths, strict=True)]
    for family in (units_of(group, params) or ()) if group["metric"] == "block" else ():
        _average_over_units(family, sums, lengths, means)
    local, new = list(map(shards.local, moments)), list(map(shards.local, means))
    torch._foreach_lerp_(local, new, weight)


def _sum_over_blocks(squares: Tensor, p: Tensor, moment: Tensor) -> Tensor:
    """Return the sum of local ``squares`` over each block, with the shape and the sharding of ``moment``."""
    sums = squares.sum_to_size(shards.local(moment).shape)
    across = [group for axis, group in shards.splits(p) if moment.shape[axis] < p.shape[axis]]
    return shards.like(shards.sum_over_ranks(sums, across), moment)


def _average_over_units(
    family: Family, sums: Sequence[Tensor], lengths: Sequence[int], means: Sequence[Tensor]
) -> None:
    """Write the mean over each whole unit to all its parts in ``means``."""
    parts = joined(family, sums)
    rows = shards.local(parts)
    size = sum(lengths[part.position] * (1 if part.indices is None else len(part.indices[0])) for part in family)
    average = (rows.sum(1, keepdim=True) / size).expand(rows.shape).contiguous()
    write_back(family, shards.like(average, parts), means)
