"""Which elements of a group are the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from proxmo import shards
from proxmo.penalties.axes import Groups, as_rows


def mask_of_largest(groups: Groups, scores: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest of ``scores`` ≥ 0 in each group; NaN counts as larger than all numbers."""
    if k >= groups.length:
        return torch.ones_like(groups.elements, dtype=torch.bool)
    if groups.sharded:
        return _largest_by_counting(groups, scores, k)
    rows = as_rows(scores, groups.axes)
    found = rows.topk(k, dim=-1).indices
    mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, found, True)
    return _from_rows(mask, groups)


def _largest_by_counting(groups: Groups, scores: Tensor, k: int) -> Tensor:
    """Do the same where groups are sharded: ranks exchange counts, never elements.

    The bit patterns of non-negative floats, read as integers, are in the order of the floats. So the k-th largest is
    found bit by bit from the highest: a bit is set if at least k elements are not below.
    """
    wide = scores.dtype == torch.float64
    bits = scores.contiguous().view(torch.int64 if wide else torch.int32)
    bits = bits & torch.iinfo(bits.dtype).max  # without the sign, which NaN may have
    threshold = torch.zeros_like(bits.sum(groups.axes, keepdim=True), dtype=bits.dtype)
    for position in reversed(range(63 if wide else 31)):
        candidate = threshold | (1 << position)
        threshold = torch.where(groups.sum(bits >= candidate) >= k, candidate, threshold)
    larger, equal = bits > threshold, bits == threshold
    # the first of equal elements stay, by rank and then by position
    free = k - groups.sum(larger)
    taken = shards.sum_over_earlier_ranks(equal.sum(groups.axes, keepdim=True), groups.sharded)
    rows = as_rows(equal, groups.axes)
    position_among_equals = _from_rows(rows.cumsum(-1), groups)
    return larger | (equal & (taken + position_among_equals <= free))


def _from_rows(rows: Tensor, groups: Groups) -> Tensor:
    """Undo `as_rows` for the elements of the groups."""
    inner = [groups.elements.shape[axis] for axis in groups.axes]
    last = tuple(range(groups.elements.dim() - len(groups.axes), groups.elements.dim()))
    return rows.reshape(*rows.shape[:-1], *inner).movedim(last, groups.axes)
