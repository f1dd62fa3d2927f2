"""Constraints: sets that the prox projects onto.

The balls, the simplex and TopK take the whole tensor as one vector, or with `dim` each group as one: everything that
shares its index along those axes. So `Simplex(dim=0)` makes each row of a matrix sum to 1: `dim` names the axes that
index the vectors, where torch's `dim` often names those that are summed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from proxmo import checks, shards
from proxmo.kernels import Kernel, LazyModule
from proxmo.penalties.axes import Groups, Step
from proxmo.penalties.base import (
    AnyFloat,
    Constraint,
    Count,
    Dim,
    Elementwise,
    Grouped,
    NonNegativeFloat,
    SumOverGroups,
    widen,
)
from proxmo.penalties.groups import group_norms
from proxmo.penalties.selection import (
    Ranking,
    Scope,
    local_step,
    mask_of_largest,
    masks_of_largest,
    process_groups_of,
    without_empty,
)
from proxmo.penalties.thresholds import LEAST, fit, project_simplex, project_simplex_in_metric, secular_root, widest

compiled_elements = LazyModule("proxmo.penalties.compiled_elements")
compiled_rows = LazyModule("proxmo.penalties.compiled_rows")


def _clamp(x: Tensor, low: float, high: float, out: Tensor | None) -> Tensor:
    low, high = (bound if math.isinf(bound) else fit(bound, x.dtype) for bound in (low, high))
    return torch.clamp(x, low, high, out=out)


def _within(x: Tensor, low: float, high: float, slack: float) -> Tensor:
    return ((x >= low - slack * abs(low)) & (x <= high + slack * abs(high))).all()


class GroupConstraint(SumOverGroups, Constraint):
    """A set for each group: a step that is the same within groups does not matter, any other makes a metric."""

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        if groups.per_group(step) is not None:
            return self._project(x, out)
        steps = widest(groups.onto_elements(step))  # type: ignore[arg-type]
        scale = groups.amax(steps)  # which does not matter
        relative = (steps / torch.where(scale > 0, scale, 1.0)).clamp_(min=LEAST[steps.dtype])
        return groups.onto_tensor(self._project_in_metric(groups, widest(groups.elements), relative))

    @abstractmethod
    def _project_in_metric(self, groups: Groups, values: Tensor, step: Tensor) -> Tensor:
        """Return the minimiser of Σ (u_i − values_i)²/step_i over the set, in float64."""


@dataclass
class Box(Elementwise, Constraint):
    """low ≤ x ≤ high for each element.

    prox: clamp x to [low, high].

    Args:
        low: the lower bound, -inf for none.
        high: the upper bound, inf for none; not below ``low``.

    >>> Box(-1.0, 1.0).prox(torch.tensor([-3.0, 0.5]), step=1.0)
    tensor([-1.0000,  0.5000])
    """

    low: AnyFloat
    high: AnyFloat
    convex: ClassVar[bool] = True

    def __setattr__(self, name: str, value: Any) -> None:
        value = checks.number(f"Box: {name}", value)
        bounds = {"low": -math.inf, "high": math.inf, **vars(self), name: value}
        # no number lies between two equal infinities
        if bounds["low"] > bounds["high"] or bounds["low"] == math.inf or bounds["high"] == -math.inf:
            raise ValueError(f"Box: low must not exceed high, got low={bounds['low']!r} and high={bounds['high']!r}")
        super().__setattr__(name, value)

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        return _within(x, self.low, self.high, slack)

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        return _clamp(x, self.low, self.high, out)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled_elements.clamp, (self.low, self.high))


@dataclass
class NonNegative(Elementwise, Constraint):
    """x ≥ 0 for each element.

    prox: max(x, 0).

    >>> NonNegative().prox(torch.tensor([-3.0, 0.5]), step=1.0)
    tensor([0.0000, 0.5000])
    """

    convex: ClassVar[bool] = True

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        return (x >= 0).all()

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        return torch.clamp(x, min=0, out=out)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled_elements.clamp, (0.0, math.inf))


@dataclass
class L1Ball(GroupConstraint):
    """Σ|x| ≤ radius: a budget that makes elements exactly zero.

    prox: sign(x)·max(|x| − τ, 0) with the τ that meets the budget; x itself inside the ball. A step for every element
    makes it τ·step_i.

    Args:
        radius: the budget, ≥ 0.
        dim: the axes that index the groups; ``None`` for the whole tensor.

    >>> L1Ball(1.0).prox(torch.tensor([2.0, -1.5, 0.1]), step=1.0)
    tensor([ 0.7500, -0.2500,  0.0000])
    """

    radius: NonNegativeFloat
    dim: Dim = None
    convex: ClassVar[bool] = True

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        groups = Groups(x, self.dim)
        return groups.every(groups.sum(groups.elements.abs()) <= self.radius * (1 + slack))

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        magnitudes = groups.elements.abs()
        inside = groups.sum(magnitudes) <= self.radius
        nearest = project_simplex(magnitudes, self.radius, groups, in_place=True).copysign_(groups.elements)
        return torch.where(groups.onto_tensor(inside), groups.tensor, groups.onto_tensor(nearest), out=out)

    def _project_in_metric(self, groups: Groups, values: Tensor, step: Tensor) -> Tensor:
        magnitudes = values.abs()
        inside = groups.sum(magnitudes) <= self.radius
        nearest = project_simplex_in_metric(magnitudes, self.radius, groups, step)
        return torch.where(inside, values, nearest.copysign_(values))

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled_rows.l1_ball, self.radius)


@dataclass
class L2Ball(GroupConstraint):
    """‖x‖₂ ≤ radius: max-norm regularization, or a bound on each neuron.

    prox: x·min(1, radius/‖x‖₂); with a step for every element x_i/(1 + θ·step_i), with the θ that makes the norm right.

    Args:
        radius: the largest norm allowed, ≥ 0.
        dim: the axes that index the groups; ``None`` for the whole tensor.

    >>> L2Ball(1.0).prox(torch.tensor([3.0, 4.0]), step=1.0)
    tensor([0.6000, 0.8000])
    """

    radius: NonNegativeFloat
    dim: Dim = None
    convex: ClassVar[bool] = True

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        groups = Groups(x, self.dim)
        return groups.every(group_norms(groups, groups.elements) <= self.radius * (1 + slack))

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        norms = groups.onto_tensor(group_norms(groups, groups.elements))
        # radius/norms may underflow where the product does not
        return torch.where(norms <= self.radius, groups.tensor, groups.tensor / norms * self.radius, out=out)

    def _project_in_metric(self, groups: Groups, values: Tensor, step: Tensor) -> Tensor:
        inside = group_norms(groups, values) <= self.radius
        a = 1 / step
        theta = secular_root(values.abs() / self.radius * a, a, groups) if self.radius else math.inf
        return torch.where(inside, values, values * (1 / (1 + theta * step)))

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled_rows.l2_ball, self.radius)


@dataclass
class LInfBall(Elementwise, Grouped, Constraint):
    """max|x| ≤ radius: bounded weights.

    prox: clamp x to [−radius, radius].

    Args:
        radius: the largest magnitude allowed, ≥ 0.
        dim: the axes that index the groups, as for the other balls; here every choice gives the same set.

    >>> LInfBall(1.0).prox(torch.tensor([-3.0, 0.5]), step=1.0)
    tensor([-1.0000,  0.5000])
    """

    radius: NonNegativeFloat
    dim: Dim = None
    convex: ClassVar[bool] = True

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        return _within(x, -self.radius, self.radius, slack)

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        return _clamp(x, -self.radius, self.radius, out)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled_elements.clamp, (-self.radius, self.radius))


@dataclass
class Simplex(GroupConstraint):
    """x ≥ 0 and Σx = radius: probabilities, mixing weights.

    prox: max(x − τ, 0) with the τ that makes the sum right; a step for every element makes it τ·step_i.

    Args:
        radius: the sum, ≥ 0.
        dim: the axes that index the groups; ``None`` for the whole tensor, 0 for each row of a matrix.

    >>> Simplex().prox(torch.tensor([0.7, 0.5, -1.0]), step=1.0)
    tensor([0.6000, 0.4000, 0.0000])
    >>> Simplex(dim=0).prox(torch.tensor([[0.7, 0.5], [3.0, 1.0]]), step=1.0)
    tensor([[0.6000, 0.4000],
            [1.0000, 0.0000]])
    """

    radius: NonNegativeFloat = 1.0
    dim: Dim = None
    convex: ClassVar[bool] = True

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        groups = Groups(x, self.dim)
        negative = groups.sum(groups.elements < 0) > 0
        # contiguous: torch loses digits in long sums over strided views
        off = (groups.sum(groups.elements.contiguous()) - self.radius).abs()
        return groups.every(~negative & (off <= slack * self.radius))

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        result = groups.onto_tensor(project_simplex(groups.elements, self.radius, groups))
        return result if out is None else out.copy_(result)

    def _project_in_metric(self, groups: Groups, values: Tensor, step: Tensor) -> Tensor:
        return project_simplex_in_metric(values, self.radius, groups, step)

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled_rows.simplex, self.radius)


@dataclass
class TopK(GroupConstraint):
    """At most k non-zeros: a sparsity that is chosen, not tuned.

    prox: keep the k elements of largest magnitude and set the others to zero; ties are broken arbitrarily. With a step
    for every element those of largest x_i²/step_i.

    Args:
        k: how many elements may be non-zero, ≥ 0.
        dim: the axes that index the groups; ``None`` for the whole tensor.
        scope: ``"each"`` counts the elements of each parameter, or with ``dim`` of each group, ``"all"`` those of all
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
        super().__setattr__(name, value)
        if vars(self).get("scope") == "all" and self.dim is not None:
            raise ValueError(f"TopK: dim must be None with scope='all', got {self.dim!r}")

    @property
    def joint(self) -> bool:
        return self.scope == "all"

    def total(self, tensors: Sequence[Tensor]) -> Tensor:
        if not self.joint or not tensors:
            return super().total(tensors)
        nonzeros = sum(x.numel() for x in tensors) - shards.count_zeros(list(tensors))
        unknown = shards.total_over_shards([shards.local(x).isnan().any() for x in tensors], tensors)
        return tensors[0].new_tensor(math.inf if nonzeros > self.k or unknown else 0.0)

    def prox_(self, tensors: list[Tensor], step: Step | list[Tensor]) -> None:
        if not self.joint:
            super().prox_(tensors, step)
        elif isinstance(step, (Tensor, list)) or step != 0:
            points, steps = without_empty(tensors, step)
            stays = masks_of_largest(list(map(self._ranking, points, steps)), self.k) if points else []
            for x, one, mask in zip(points, steps, stays, strict=True):
                local = shards.local(x)
                mask = mask | local.isnan() | (torch.as_tensor(local_step(one, x)) == 0)
                local.copy_(torch.where(mask, local, local.new_zeros(())))
            shards.mark_written(points)

    def _ranking(self, x: Tensor, step: Step) -> Ranking:
        local = shards.local(widen(x)).abs()
        steps = local_step(step, x)
        in_metric = isinstance(steps, Tensor) and steps.dim() > 0
        return Ranking(local / steps.sqrt() if in_metric else local, process_groups_of(x))  # type: ignore[union-attr]

    def _inside(self, x: Tensor, slack: float) -> Tensor:
        groups = Groups(x, self.dim)
        unknown = groups.sum(groups.elements.isnan()) > 0
        return groups.every((groups.sum(groups.elements != 0) <= self.k) & ~unknown)

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        return self._keep_largest(groups, groups.elements.abs(), out)

    def _project_in_metric(self, groups: Groups, values: Tensor, step: Tensor) -> Tensor:
        return groups.onto_elements(self._keep_largest(groups, values.abs() / step.sqrt(), None))

    def _keep_largest(self, groups: Groups, scores: Tensor, out: Tensor | None) -> Tensor:
        stays = mask_of_largest(groups, scores, self.k) | groups.elements.isnan()  # NaN must not go unseen
        return torch.where(groups.onto_tensor(stays), groups.tensor, groups.tensor.new_zeros(()), out=out)


@dataclass
class NM(Constraint):
    """At most n non-zeros among every m neighbours along the last axis: 2:4 sparsity and its kin.

    prox: in each run of m neighbours keep the n of largest magnitude and set the others to zero. With a step for every
    element those of largest x_i²/step_i.

    Args:
        n: how many of the neighbours may be non-zero, ≥ 0.
        m: how many neighbours there are, ≥ 1; the size of the last axis must be a multiple.

    >>> NM(2, 4).prox(torch.tensor([3.0, -4.0, 1.0, 2.0, 0.1, 0.2, 0.3, 0.0]), step=1.0)
    tensor([ 3.0000, -4.0000,  0.0000,  0.0000,  0.0000,  0.2000,  0.3000,  0.0000])
    """

    n: Count
    m: Annotated[int, partial(checks.count, least=1)]
    convex: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    elementwise_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.n > self.m:
            raise ValueError(f"NM: n must be at most m = {self.m}, got {self.n}")

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
