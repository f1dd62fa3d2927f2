"""Constraints: sets that the prox projects onto.

The balls and the simplex take the whole tensor as one vector, or with `dim` each group as one: everything that
shares its index along those axes. So `Simplex(dim=0)` makes each row of a matrix sum to 1: `dim` names the axes that
index the vectors, where torch's `dim` often names those that are summed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from proxmo import checks
from proxmo.kernels import Kernel
from proxmo.penalties.axes import Groups, Step
from proxmo.penalties.base import AnyFloat, Dim, NonNegativeFloat
from proxmo.penalties.elementwise import compiled as compiled_elements
from proxmo.penalties.groups import compiled as compiled_rows
from proxmo.penalties.groups import group_norms, in_metric
from proxmo.penalties.kinds import Constraint, Elementwise, Grouped, SumOverGroups
from proxmo.penalties.thresholds import LEAST, fit, project_simplex, secular_root, widest


def _clamp(x: Tensor, low: float, high: float, out: Tensor | None) -> Tensor:
    low, high = (bound if math.isinf(bound) else fit(bound, x.dtype) for bound in (low, high))
    return torch.clamp(x, low, high, out=out)


def _within(x: Tensor, low: float, high: float, slack: float) -> Tensor:
    return ((x >= low - slack * abs(low)) & (x <= high + slack * abs(high))).all()


def _outward(x: Tensor, v: Tensor, low: float, high: float, slack: float) -> Tensor:
    """Return the part of ``v`` that points out of the box, at the bounds where ``x`` is."""
    at_low, at_high = x <= low + slack * abs(low), x >= high - slack * abs(high)
    return torch.where(at_low, v.clamp(max=0), 0.0) + torch.where(at_high, v.clamp(min=0), 0.0)


def _level_of_slopes(slopes: Tensor, support: Tensor, groups: Groups) -> Tensor:
    """Return the θ of each group with Σ (slope − θ) over the support + Σ (slope − θ)₊ over the others = 0.

    Michelot's method: the mean over the support and all others, then again without those that are below it.
    """
    counted = torch.ones_like(support)
    while True:
        level = groups.sum(torch.where(counted, slopes, 0.0)) / groups.sum(counted)
        kept = support | (counted & (slopes > level))
        if bool((kept == counted).all()):
            return level
        counted = kept


class GroupConstraint(SumOverGroups, Constraint):
    """A set for each group: a step that is the same within groups does not matter, any other makes a metric."""

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        if groups.per_group(step) is not None:
            return groups.onto_tensor(self._nearest(groups, groups.elements, None))
        steps = widest(groups.onto_elements(step))  # type: ignore[arg-type]
        scale = groups.amax(steps)  # which does not matter
        relative = (steps / torch.where(scale > 0, scale, 1.0)).clamp_(min=LEAST[steps.dtype])
        return groups.onto_tensor(self._nearest(groups, widest(groups.elements), relative))

    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        return self._prox(x, 1.0, out)

    @abstractmethod
    def _nearest(self, groups: Groups, values: Tensor, step: Tensor | None) -> Tensor:
        """Return the minimiser of Σ (u_i − values_i)²/step_i over the set; ``None`` stands for equal steps."""


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

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        return _outward(x, v, self.low, self.high, slack)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled_elements().clamp, (self.low, self.high))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().clamp, (self.low, self.high))


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

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        return _outward(x, v, 0.0, math.inf, slack)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled_elements().clamp, (0.0, math.inf))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().clamp, (0.0, math.inf))


@dataclass
class L1Ball(GroupConstraint):
    """Σ|x| ≤ radius: a budget that makes elements exactly zero.

    prox: sign(x)·max(|x| − τ, 0) with the τ that meets the budget; x itself inside the ball. With a step for every
    element, τ·step_i replaces τ.

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

    def _nearest(self, groups: Groups, values: Tensor, step: Tensor | None) -> Tensor:
        magnitudes = values.abs()
        inside = groups.sum(magnitudes) <= self.radius
        nearest = project_simplex(magnitudes, self.radius, groups, step).copysign_(values)
        return torch.where(inside, values, nearest)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        groups, values = Groups(x, self.dim), Groups(v, self.dim).elements
        support = groups.elements != 0
        uphill = torch.where(support, values * groups.elements.sign(), values.abs())
        level = _level_of_slopes(uphill, support, groups).relu_()  # λ·∂‖x‖₁, λ ≥ 0
        slopes = torch.where(support, level * groups.elements.sign(), torch.clamp(values, -level, level))
        inside = groups.sum(groups.elements.abs()) < self.radius * (1 - slack)
        return groups.onto_tensor(torch.where(inside, 0.0, slopes)) if self.radius else v

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled_rows().l1_ball, self.radius)


@dataclass
class L2Ball(GroupConstraint):
    """‖x‖₂ ≤ radius: max-norm regularization, or a bound on each neuron.

    prox: x·min(1, radius/‖x‖₂). With a step for every element: x_i/(1 + θ·step_i), with the θ that gives the right
    norm.

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

    def _nearest(self, groups: Groups, values: Tensor, step: Tensor | None) -> Tensor:
        norms = group_norms(groups, values)
        if step is None:
            nearest = values / norms * self.radius  # radius/norms may underflow where the product does not
        else:
            theta = secular_root(values.abs() / self.radius, 1.0, step, groups) if self.radius else math.inf
            nearest = values * (1 / (1 + theta * step))
        return torch.where(norms <= self.radius, values, nearest)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        groups, values = Groups(x, self.dim), Groups(v, self.dim).elements
        norms = group_norms(groups, groups.elements)
        normals = groups.elements / norms
        slopes = groups.sum(values * normals).relu() * normals
        return groups.onto_tensor(torch.where(norms < self.radius * (1 - slack), 0.0, slopes)) if self.radius else v

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled_rows().l2_ball, self.radius)


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

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        return _outward(x, v, -self.radius, self.radius, slack)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled_elements().clamp, (-self.radius, self.radius))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().clamp, (-self.radius, self.radius))


@dataclass
class Simplex(GroupConstraint):
    """x ≥ 0 and Σx = radius: probabilities, mixing weights.

    prox: max(x − τ, 0) with the τ that gives the right sum. With a step for every element, τ·step_i replaces τ.

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

    def _nearest(self, groups: Groups, values: Tensor, step: Tensor | None) -> Tensor:
        return project_simplex(values.clone(), self.radius, groups, step)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        groups, values = Groups(x, self.dim), Groups(v, self.dim).elements
        support = groups.elements > 0
        level = _level_of_slopes(values, support, groups)
        slopes = torch.where(support, level, torch.minimum(values, level))
        return groups.onto_tensor(slopes) if self.radius else v

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled_rows().simplex, self.radius)
