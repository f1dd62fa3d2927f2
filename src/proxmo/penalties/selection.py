"""Which elements of a group, or which blocks of several tensors, are the largest.

Ranks that hold shards exchange counts, never elements: the bit patterns of non-negative floats, read as integers, are
in the order of the floats, so the k-th largest is found bit by bit from the highest. A bit is set if at least k scores
are not below. Of equal scores the first are taken, by tensor, then by rank, then by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from proxmo import shards
from proxmo.eager import is_eager_cpu
from proxmo.penalties.axes import Groups, Step, as_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MANY = 1 << 20  # scores from which on a sample saves most of the selection
_SAMPLE = 1 << 14
SCOPES = ("all", "each")


def _check_scope(name: str, value: Any) -> str:
    if value not in SCOPES:
        raise ValueError(f"{name} must be one of {SCOPES}, got {value!r}")
    return str(value)


Scope = Annotated[Literal["all", "each"], _check_scope]
"""Whether the blocks of all tensors of a parameter group are ranked together, or those of each alone."""


class Ranking(NamedTuple):
    """The scores of one tensor's blocks in a ranking of several tensors."""

    scores: Tensor
    """A number ≥ 0 for each local block; NaN counts as larger than all numbers."""
    process_groups: tuple[ProcessGroup, ...]
    """Those over which the other blocks of the tensor are sharded."""


def without_empty(tensors: list[Tensor], step: Step | list[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors with elements and a step for each."""
    steps = step if isinstance(step, list) else [step] * len(tensors)
    pairs = [(x, one) for x, one in zip(tensors, steps, strict=True) if x.numel()]
    return [x for x, _ in pairs], [one for _, one in pairs]


def has_metric(step: Step | list[Tensor]) -> bool:
    """Whether steps may differ, between elements or between tensors, so that magnitudes alone do not rank."""
    return isinstance(step, list) or (isinstance(step, Tensor) and step.numel() > 1)


def steps_of_others(step: Step | list[Tensor], steps: Sequence[Any], count: int) -> list[Step]:
    """Return steps to rank so many tensors by that a step leaves alone: in a metric, the mean of the known ones."""
    if count == 0 or not isinstance(step, list):
        return [1.0 if isinstance(step, list) else step] * count
    sums = [shards.local(one).double().sum() for one in steps]
    return [shards.total_over_shards(sums, steps) / max(sum(one.numel() for one in steps), 1) or 1.0] * count


def process_groups_of(x: Tensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups over which the elements of ``x`` are sharded."""
    return tuple(split.process_group for split in shards.splits(x))


def local_step(step: Step, x: Tensor) -> Step:
    """Return a step in float64 that broadcasts to the local shard of ``x``."""
    if not isinstance(step, Tensor):
        return step
    return step.double().reshape(()) if step.numel() == 1 else shards.local_step(step, x).double()


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


def masks_of_largest(rankings: Sequence[Ranking], k: int) -> list[Tensor]:
    """Return a mask for each ranking; together they select the k largest scores of all, the first of equal ones."""
    if not rankings:
        return []
    sharded = any(ranking.process_groups for ranking in rankings)
    dtype = torch.float64 if any(ranking.scores.dtype == torch.float64 for ranking in rankings) else torch.float32
    device = rankings[0].scores.device
    scores = [ranking.scores.detach().to(device, dtype).flatten() for ranking in rankings]
    if sharded:
        masks = _largest_of_all_by_counting(scores, [ranking.process_groups for ranking in rankings], k)
    else:
        masks = list(torch.split(_largest(torch.cat(scores), k), [len(flat) for flat in scores]))
    return [
        mask.to(ranking.scores.device).reshape(ranking.scores.shape)
        for mask, ranking in zip(masks, rankings, strict=True)
    ]


def _largest(scores: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest of a vector, the first of equal ones."""
    if k >= len(scores):
        return torch.ones_like(scores, dtype=torch.bool)
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = _kth_largest(scores, k)
    if not is_eager_cpu(scores):
        larger, equal = scores > least, scores == least
        return larger | (equal & (equal.cumsum(0) <= k - larger.sum()))
    mask = scores >= least
    surplus = int(torch.count_nonzero(mask)) - k
    if surplus:  # ties, of which the last go
        ties = (scores == least).nonzero().flatten()
        mask[ties[len(ties) - surplus :]] = False
    return mask


def _kth_largest(scores: Tensor, k: int) -> Tensor:
    """Return the k-th largest of a vector; of a long one by a selection among those near it, as a sample tells."""
    if not is_eager_cpu(scores):  # kthvalue has no deterministic algorithm on accelerators
        if 2 * k <= len(scores):
            return scores.topk(k).values[-1]
        return scores.topk(len(scores) - k + 1, largest=False).values[-1]  # from the side where fewer are sorted
    if len(scores) >= _MANY:
        sample = scores[:: len(scores) // _SAMPLE].sort().values
        share = k / len(scores)
        # The place of the k-th largest in the sample, give or take five standard deviations.
        place, margin = len(sample) * (1 - share), 5 * math.sqrt(len(sample) * share * (1 - share)) + 2
        low, high = (sample[min(max(round(place + way), 0), len(sample) - 1)] for way in (-margin, margin))
        not_below = scores[scores >= low]
        near = not_below[not_below <= high]
        among = k - (len(not_below) - len(near))
        if 0 < among <= len(near):
            scores, k = near, among
    return scores.kthvalue(len(scores) - k + 1).values


def _largest_by_counting(groups: Groups, scores: Tensor, k: int) -> Tensor:
    """Do what `mask_of_largest` does where groups are sharded."""
    bits = _bits(scores)
    none = torch.zeros_like(bits.sum(groups.axes, keepdim=True), dtype=bits.dtype)
    least = _kth_largest_bits(none, lambda candidate: groups.sum(bits >= candidate) >= k)
    larger, equal = bits > least, bits == least
    free = k - groups.sum(larger)
    taken = shards.sum_over_earlier_ranks(equal.sum(groups.axes, keepdim=True), groups.sharded)
    position_among_equals = _from_rows(as_rows(equal, groups.axes).cumsum(-1), groups)
    return larger | (equal & (taken + position_among_equals <= free))


def _largest_of_all_by_counting(
    scores: Sequence[Tensor], process_groups: Sequence[tuple[ProcessGroup, ...]], k: int
) -> list[Tensor]:
    """Do what `masks_of_largest` does where tensors are sharded."""
    bits = [_bits(flat) for flat in scores]

    def count(masks: Sequence[Tensor]) -> Tensor:
        counts = torch.stack([mask.sum() for mask in masks])
        for over in dict.fromkeys(process_groups):
            chosen = [position for position, groups in enumerate(process_groups) if groups == over]
            counts[chosen] = shards.sum_over_ranks(counts[chosen], over)
        return counts

    none = torch.zeros((), dtype=bits[0].dtype, device=bits[0].device)
    least = _kth_largest_bits(none, lambda candidate: count([b >= candidate for b in bits]).sum() >= k)
    larger, equal = [b > least for b in bits], [b == least for b in bits]
    free = k - count(larger).sum()
    counted = count(equal)
    equal_before = counted.cumsum(0) - counted
    masks = []
    for position, groups in enumerate(process_groups):
        taken = equal_before[position] + shards.sum_over_earlier_ranks(equal[position].sum(), groups)
        masks.append(larger[position] | (equal[position] & (taken + equal[position].cumsum(0) <= free)))
    return masks


def _kth_largest_bits(none: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest bits for which ``enough`` tells that at least k scores are not below, from ``none`` set."""
    found = none
    for position in reversed(range(torch.iinfo(none.dtype).bits - 1)):
        candidate = found | (1 << position)
        found = torch.where(enough(candidate), candidate, found)
    return found


def _bits(scores: Tensor) -> Tensor:
    """Return non-negative floats as integers in the same order, without the sign that NaN may have."""
    bits = scores.contiguous().view(torch.int64 if scores.dtype == torch.float64 else torch.int32)
    return bits & torch.iinfo(bits.dtype).max


def _from_rows(rows: Tensor, groups: Groups) -> Tensor:
    """Undo `as_rows` for the elements of the groups."""
    inner = [groups.elements.shape[axis] for axis in groups.axes]
    last = tuple(range(groups.elements.dim() - len(groups.axes), groups.elements.dim()))
    return rows.reshape(*rows.shape[:-1], *inner).movedim(last, groups.axes)
