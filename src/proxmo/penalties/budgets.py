"""Budgets: constraints on the number of non-zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from proxmo import checks, shards
from proxmo.penalties.axes import Groups, Step
from proxmo.penalties.base import Count, Dim, widen
from proxmo.penalties.constraints import GroupConstraint
from proxmo.penalties.kinds import Constraint
from proxmo.penalties.selection import (
    Ranking,
    Scope,
    has_metric,
    local_step,
    mask_of_largest,
    masks_of_largest,
    process_groups_of,
    steps_of_others,
    without_empty,
)


@dataclass
class TopK(GroupConstraint):
    """At most k non-zeros: you choose the sparsity directly.

    prox: keep the k elements of largest magnitude and set the others to zero; ties are broken arbitrarily. With a step
    for every element, keep those of largest x_i²/step_i.

    Args:
        k: the number of elements that may be non-zero, ≥ 0.
        dim: the axes that index the groups; ``None`` for the whole tensor.
        scope: ``"each"`` counts the elements of each parameter (with ``dim``, of each group), ``"all"`` those of all
            parameters of a parameter group together.

    >>> TopK(1, dim=0).prox(torch.tensor([[3.0, -4.0], [2.0, 1.0]]), step=1.0)
    tensor([[ 0., -4.],
            [ 2.,  0.]])
    """

    k: Count
    dim: Dim = None
    scope: Scope = "each"
    convex: ClassVar[bool] = False

    def __setattr__(self, name: str, value: Any) -> None:
        fields = {**vars(self), name: value}
        if fields.get("scope") == "all" and fields["dim"] is not None:
            raise ValueError(f"TopK: dim must be None with scope='all', got {fields['dim']!r}")
        super().__setattr__(name, value)

    @property
    def joint(self) -> bool:
        return self.scope == "all"

    def total(self, tensors: Sequence[Tensor]) -> Tensor:
        if not self.joint or not tensors:
            return super().total(tensors)
        nonzeros = sum(x.numel() for x in tensors) - shards.count_zeros(list(tensors))
        unknown = shards.total_over_shards([shards.local(x).isnan().any() for x in tensors], tensors)
        return tensors[0].new_tensor(math.inf if nonzeros > self.k or unknown else 0.0)

    def prox_(self, tensors: list[Tensor], step: Step | list[Tensor], others: Sequence[Tensor] = ()) -> None:
        if not self.joint:
            super().prox_(tensors, step)
        elif isinstance(step, (Tensor, list)) or step != 0:
            points, steps = without_empty(tensors, step)
            rest = [x for x in others if x.numel()]
            all_steps = [*steps, *steps_of_others(step, steps, len(rest))]
            in_metric = has_metric(step)
            rankings = [self._ranking(x, one, in_metric) for x, one in zip([*points, *rest], all_steps, strict=True)]
            stays = masks_of_largest(rankings, self.k)
            for x, one, mask in zip(points, steps, stays, strict=False):
                local = shards.local(x)
                mask = mask | local.isnan() | (torch.as_tensor(local_step(one, x)) == 0)
                local.copy_(torch.where(mask, local, local.new_zeros(())))
            shards.mark_written(points)

    def _ranking(self, x: Tensor, step: Step, in_metric: bool) -> Ranking:
        local = shards.local(widen(x)).abs()
        return Ranking(local / local_step(step, x) ** 0.5 if in_metric else local, process_groups_of(x))

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        groups = Groups(x, self.dim)
        unknown = groups.sum(groups.elements.isnan()) > 0
        return groups.every((groups.sum(groups.elements != 0) <= self.k) & ~unknown)

    def _nearest(self, groups: Groups, values: Tensor, step: Tensor | None) -> Tensor:
        scores = values.abs() if step is None else values.abs() / step.sqrt()
        stays = mask_of_largest(groups, scores, self.k) | values.isnan()  # NaN must not go unseen
        return torch.where(stays, values, 0.0)


@dataclass
class NM(Constraint):
    """At most n non-zeros among every m neighbours along the last axis, such as 2:4 sparsity.

    prox: among each m neighbours keep the n of largest magnitude and set the others to zero. With a step for every
    element, keep those of largest x_i²/step_i.

    Args:
        n: the number of neighbours that may be non-zero, ≥ 0.
        m: the number of neighbours, ≥ 1; the size of the last axis must be a multiple of it.

    >>> NM(2, 4).prox(torch.tensor([3.0, -4.0, 1.0, 2.0, 0.1, 0.2, 0.3, 0.0]), step=1.0)
    tensor([ 3.0000, -4.0000,  0.0000,  0.0000,  0.0000,  0.2000,  0.3000,  0.0000])
    """

    n: Count
    m: Count
    convex: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    elementwise_step: ClassVar[bool] = True

    def __setattr__(self, name: str, value: Any) -> None:
        fields = {**vars(self), name: value}
        if "m" in fields and checks.count("NM: n", fields["n"]) > checks.count("NM: m", fields["m"], least=1):
            raise ValueError(f"NM: n must be at most m = {fields['m']}, got {fields['n']}")
        super().__setattr__(name, value)

    def check(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] % self.m:
            raise ValueError(f"NM: the size of the last axis must be a multiple of m = {self.m}, got {tuple(x.shape)}")

    def acts_on_rows(self, x: Tensor) -> bool:
        return x.dim() > 1

    def _runs(self, x: Tensor) -> Groups:
        runs = x.reshape(*x.shape[:-1], -1, self.m)
        return Groups(runs, tuple(range(runs.dim() - 1)))

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        groups = self._runs(x)
        return (groups.sum(groups.elements != 0) <= self.n).all() & ~x.isnan().any()

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        in_metric = isinstance(step, Tensor) and step.dim() > 0
        return self._keep_largest(x, x.abs() / step.sqrt() if in_metric else x.abs(), out)  # type: ignore[union-attr]

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        return self._keep_largest(x, x.abs(), out)

    def _keep_largest(self, x: Tensor, scores: Tensor, out: Tensor | None) -> Tensor:
        groups = self._runs(scores)
        stays = mask_of_largest(groups, groups.elements, self.n).flatten(-2) | x.isnan()  # NaN must not go unseen
        return torch.where(stays, x, x.new_zeros(()), out=out)
