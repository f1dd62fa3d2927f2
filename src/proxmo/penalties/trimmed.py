"""Penalties that leave the largest blocks alone: a target in place of a strength.

ψ_K(x) = the sum of h over all blocks but K, with the K chosen so that it is smallest. A block is an element or a group
of the penalty h is taken from. The prox chooses as well: a block that is left alone costs nothing, any other its Moreau
envelope, so the K largest envelopes are spared and the others take the ordinary prox. This is exact for every h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from numbers import Integral
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from proxmo import checks, shards
from proxmo.penalties.axes import Groups, Step
from proxmo.penalties.base import Penalty, widen
from proxmo.penalties.elementwise import L1
from proxmo.penalties.groups import GroupL2, GroupLInf, group_norms
from proxmo.penalties.kinds import Constraint, Elementwise, Shrinkage, SumOverGroups
from proxmo.penalties.selection import (
    Ranking,
    Scope,
    has_metric,
    local_step,
    masks_of_largest,
    process_groups_of,
    steps_of_others,
    without_empty,
)
from proxmo.penalties.thresholds import widest


def _check_penalty(name: str, value: Any) -> Penalty:
    takes = "a penalty that is a sum over elements or groups, such as L1(0.1) or GroupL2(0.1)"
    if not isinstance(value, Penalty):
        raise TypeError(f"{name} must be {takes}, got {value!r}")
    if isinstance(value, Elementwise):
        known = type(value)._element_values is not Elementwise._element_values
    else:
        known = isinstance(value, SumOverGroups) and type(value)._group_values is not SumOverGroups._group_values
    if isinstance(value, Constraint) or not known:
        raise ValueError(f"{name} must be {takes}, got {value!r}")
    return value


def check_keep(name: str, value: Any) -> float | int:
    """A share in (0, 1] or a count ≥ 1."""
    takes = "a share in (0, 1] as a float, or a count >= 1 as an integer"
    if isinstance(value, Integral) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"{name} must be {takes}, got {value!r}")
        return int(value)
    return checks.share(name, value, takes=takes)


@dataclass
class Trimmed(Penalty):
    """The sum of h(x_g) over all blocks except the ``keep`` largest, which are not shrunk: a target, not a strength.

    A block is an element or a group. If the strength is large enough, all other blocks become zero, and its exact value
    matters very little. `KeepScheduler` sets it and lowers ``keep`` during training.

    prox: leave the blocks with the largest Moreau envelopes alone and apply the prox of ``penalty`` to the others. If
    all blocks have the same step, these are the blocks of largest magnitude or, for `GroupL2`, of largest norm. Ties go
    to the first blocks, so that exactly ``keep`` are left alone.

    Args:
        penalty: a sum over elements or groups, such as `L1` or `GroupL2`; not a constraint.
        keep: how many blocks are left alone: a share of all blocks in (0, 1] as a float (at least one block), or a
            count as an integer.
        scope: ``"all"`` ranks the blocks of all parameters of a parameter group together, ``"each"`` those of each
            parameter alone.

    >>> import torch, proxmo
    >>> Trimmed(proxmo.L1(1.0), keep=0.25).prox(torch.tensor([0.3, -2.0, 1.5, 0.8]), step=1.0)
    tensor([ 0.0000, -2.0000,  0.5000,  0.0000])
    """

    penalty: Annotated[Elementwise | SumOverGroups, _check_penalty]
    keep: Annotated[float | int, check_keep]
    scope: Scope = "all"
    convex: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    elementwise_step: ClassVar[bool] = True

    @property
    def joint(self) -> bool:
        return self.scope == "all"

    def total(self, tensors: Sequence[Tensor]) -> Tensor:
        for x in tensors:
            self.check(checks.floating("x", x))
        rankings = [self._values(x) for x in tensors if x.numel()]
        if not rankings:
            return torch.zeros((), device=tensors[0].device if tensors else None)
        values = [
            shards.sum_over_ranks(_sum_of_others(ranking.scores, spared), ranking.process_groups)
            for ranking, spared in zip(rankings, self._spared(rankings, tensors), strict=True)
        ]
        return sum((value.to(values[0].device) for value in values[1:]), values[0])

    def value(self, x: Tensor) -> Tensor:
        return self.total([x])

    def prox_(self, tensors: list[Tensor], step: Step | list[Tensor], others: Sequence[Tensor] = ()) -> None:
        no_step = not isinstance(step, (Tensor, list)) and step == 0
        tensors, steps = without_empty(tensors, step)
        ranked = [*tensors, *(x for x in others if x.numel())] if self.joint else tensors
        if no_step or self.count_spared(ranked) == self.count_blocks(ranked):
            return
        shrunk = [x.clone() for x in tensors]
        self.penalty.prox_(shrunk, step if not isinstance(step, list) else steps)
        missing = len(ranked) - len(tensors)
        all_steps = [*steps, *steps_of_others(step, steps, missing)]
        in_metric = has_metric(step)
        rankings = [
            self._envelopes(x, one, in_metric, near)
            for x, one, near in zip(ranked, all_steps, [*shrunk, *[None] * missing], strict=True)
        ]
        for x, near, spared in zip(tensors, shrunk, self._spared(rankings, ranked), strict=False):
            local = shards.local(x)
            local.copy_(torch.where(spared, local, shards.local(near)))
        shards.mark_written(tensors)

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        result = x.clone() if out is None else out.copy_(x)
        self.prox_([result], step)
        return result

    def _check_step(self, step: Step) -> None:
        self.penalty._check_step(step)

    def check(self, x: Tensor) -> None:
        self.penalty.check(x)
        if not self.joint and x.numel():
            self.check_blocks(prod(self.block_shape(x)))

    def check_blocks(self, count: int) -> None:
        if isinstance(self.keep, int) and self.keep > count:
            raise ValueError(f"keep must be at most the number of elements or groups, {count}, got {self.keep}")

    def takes_units(self) -> bool:
        return self.penalty.takes_units()

    def for_larger_groups(self, factor: float) -> Self:
        """Return a copy with the strength for groups that have ``factor`` times as many elements."""
        inner = self.penalty.for_larger_groups(factor) if isinstance(self.penalty, SumOverGroups) else self.penalty
        return replace(self, penalty=inner)

    def block_shape(self, x: Tensor) -> tuple[int, ...]:
        return self.penalty.block_shape(x)

    def zero_groups(self, x: Tensor) -> tuple[int, int] | None:
        return self.penalty.zero_groups(x)

    def count_to_keep(self, blocks: int) -> int:
        """Return how many of ``blocks`` blocks are left alone.

        >>> import proxmo
        >>> Trimmed(proxmo.L1(1.0), keep=0.1).count_to_keep(25)
        2
        """
        count = self.keep if isinstance(self.keep, int) else max(1, round(self.keep * blocks))
        return min(count, blocks)

    def count_blocks(self, tensors: Sequence[Tensor]) -> int:
        """Return how many blocks the tensors of a parameter group have."""
        return sum(prod(self.block_shape(x)) for x in tensors if x.numel())

    def count_spared(self, tensors: Sequence[Tensor]) -> int:
        """Return how many blocks of the tensors of a parameter group are left alone."""
        if self.joint:
            return self.count_to_keep(self.count_blocks(tensors))
        return sum(self.count_to_keep(prod(self.block_shape(x))) for x in tensors if x.numel())

    def count_nonzero(self, tensors: Sequence[Tensor]) -> int:
        """Return how many blocks of the tensors of a parameter group are not zero."""
        if isinstance(self.penalty, Elementwise):
            return self.count_blocks(tensors) - shards.count_zeros(tensors)
        all_groups = [Groups(x, self.penalty.dim) for x in tensors if x.numel()]
        return sum(int(groups.total(groups.sum(groups.elements != 0) > 0)) for groups in all_groups)

    @property
    def knows_thresholds(self) -> bool:
        """Whether the strength at which blocks vanish is known, for `sufficient_strength`."""
        return type(self.penalty) in (L1, GroupL2, GroupLInf)

    def sufficient_strength(self, tensors: Sequence[Tensor], step: float | list[Tensor]) -> float:
        """Return the smallest strength at which every block that is not left alone vanishes in one step."""
        tensors, steps = without_empty(list(tensors), step)
        rankings = [self._envelopes(x, one, has_metric(step)) for x, one in zip(tensors, steps, strict=True)]
        spared = self._spared(rankings, tensors)
        largest = 0.0
        for x, one, mask in zip(tensors, steps, spared, strict=True):
            thresholds, process_groups = self._thresholds(widen(x) / one)
            others = torch.where(mask, 0.0, thresholds)
            found = others.max() if others.numel() else others.new_zeros(())
            largest = max(largest, float(shards.max_over_ranks(found, process_groups)))
        return largest

    def _thresholds(self, x: Tensor) -> Ranking:
        """Return for each block of x = point/step the strength from which on it vanishes."""
        if isinstance(self.penalty, Elementwise):
            return Ranking(shards.local(x).abs(), process_groups_of(x))
        groups = Groups(x, self.penalty.dim)
        by_norm = isinstance(self.penalty, GroupL2)
        found = group_norms(groups, groups.elements) if by_norm else groups.sum(groups.elements.abs())
        return Ranking(groups.onto_tensor(found), tuple(groups.apart))

    def _spared(self, rankings: Sequence[Ranking], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a mask of the blocks to leave alone for each ranking, one for each tensor that is not empty."""
        blocks = [prod(self.block_shape(x)) for x in tensors if x.numel()]
        if self.joint:
            return masks_of_largest(rankings, self.count_to_keep(sum(blocks)))
        return [
            masks_of_largest([ranking], self.count_to_keep(count))[0]
            for ranking, count in zip(rankings, blocks, strict=True)
        ]

    def _values(self, x: Tensor) -> Ranking:
        """Rank the blocks of ``x`` by their values."""
        work = shards.full(widen(x)) if x.requires_grad and torch.is_grad_enabled() else widen(x)
        if isinstance(self.penalty, Elementwise):
            return Ranking(self.penalty._element_values(shards.local(work)), process_groups_of(work))
        groups = Groups(work, self.penalty.dim)
        values = self.penalty._group_values(groups, groups.elements)
        return Ranking(groups.onto_tensor(values), tuple(groups.apart))

    def _envelopes(self, x: Tensor, step: Step, in_metric: bool, near: Tensor | None = None) -> Ranking:
        """Rank the blocks of ``x`` by their Moreau envelopes, or without a metric by numbers in the same order.

        ``near`` is the prox of ``x``, if it is known. Its rounding hardly matters: it enters the envelope, which is
        smallest there, by its square; that of half precision would.
        """
        near = near if near is not None and widen(near) is near else None
        x, penalty = widen(x), self.penalty
        if isinstance(penalty, Elementwise):
            if type(penalty).__base__ is Shrinkage and not in_metric:  # a subclass may have changed the order
                return Ranking(shards.local(x).abs(), process_groups_of(x))
            return Ranking(_element_envelopes(penalty, x, step, near), process_groups_of(x))
        exact = widest(x)  # so that near-ties are decided alike in all precisions
        groups = Groups(exact, penalty.dim)
        if type(penalty) is GroupL2 and not in_metric:
            scores = group_norms(groups, groups.elements)
        else:
            scores = _group_envelopes(penalty, exact, step, near)
        return Ranking(groups.onto_tensor(scores), tuple(groups.apart))


def _sum_of_others(values: Tensor, spared: Tensor) -> Tensor:
    return torch.where(spared & ~values.isnan(), 0.0, values).sum()  # NaN must not go unseen


def _element_envelopes(penalty: Elementwise, x: Tensor, step: Step, near: Tensor | None) -> Tensor:
    local, steps = shards.local(x).double(), local_step(step, x)
    near = penalty._prox(local, steps, None) if near is None else shards.local(near).double()
    return penalty._element_values(near) + (near - local).square() / (2 * steps)


def _group_envelopes(penalty: SumOverGroups, x: Tensor, step: Step, near: Tensor | None) -> Tensor:
    groups, steps = Groups(x, penalty.dim), local_step(step, x)
    near = penalty._prox(x, steps, None) if near is None else shards.local(near).to(x.dtype)
    near = near.reshape(groups.elements.shape)
    spread = steps if not isinstance(steps, Tensor) or steps.dim() == 0 else groups.onto_elements(steps)
    gaps = groups.sum((near - groups.elements).square() / (2 * spread))
    return penalty._group_values(groups, near) + gaps
