"""Penalties that make whole groups vanish: rows, neurons, channels.

A group is everything that shares its index along the axes `dim`: with `dim=0` on a Linear or Conv weight, all weights
into one output neuron or channel. In formulas x_g is a group, s the strength and t = step·s. Where the step differs
within a group, x_i, t_i and step_i are its elements. At zero the subdifferential of a norm is the unit ball of its
dual, and v − prox(v) with step 1 the projection onto it (Moreau).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from proxmo.eager import is_eager_cpu
from proxmo.kernels import Kernel
from proxmo.penalties.axes import Groups, Step
from proxmo.penalties.base import Dim, NonNegativeFloat
from proxmo.penalties.elementwise import slope_of_magnitude, soft_threshold
from proxmo.penalties.kinds import SumOverGroups
from proxmo.penalties.thresholds import LEAST, cap, is_moderate, level_in_metric, project_simplex, secular_root, widest

# Imported with numba, when a kernel is asked for.
compiled = partial(import_module, "proxmo.penalties.compiled_rows")
in_metric = partial(import_module, "proxmo.penalties.compiled_metric")


def group_norms(groups: Groups, values: Tensor) -> Tensor:
    """Return the Euclidean norm of ``values`` over each group.

    Squares may overflow or vanish; then each group is scaled by its largest element. Not `torch.linalg.vector_norm`: in
    float32 it loses digits with the length of the group (1% at 10⁷ elements on a CPU), sums do not.
    """
    if not is_eager_cpu(values) or groups.sharded:
        return _scaled_norms(groups, values)
    numbers = torch.finfo(values.dtype)
    squares = groups.sum(values.square())
    has_digits = (squares > groups.length * numbers.tiny / numbers.eps) & (squares < numbers.max)
    norms = squares.sqrt_()
    return norms if bool(has_digits.all()) else torch.where(has_digits, norms, _scaled_norms(groups, values))


def _scaled_norms(groups: Groups, values: Tensor) -> Tensor:
    magnitudes = values.abs()
    scale = group_scales(groups, magnitudes.detach())
    squares = groups.sum((magnitudes / scale).square())
    zero = squares == 0  # where the square root has no slope; autograd then gives 0, a subgradient
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt()) * scale


def group_scales(groups: Groups, magnitudes: Tensor) -> Tensor:
    """Return the largest magnitude of each group; 1 where that is zero or not finite."""
    largest = groups.amax(magnitudes)
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def shrink_groups(groups: Groups, x: Tensor, threshold: Step, out: Tensor | None) -> Tensor:
    """Return the prox of Σ_g ‖x_g‖₂ for a step ``threshold``, with ``x`` of the shape of ``groups.tensor``."""
    values = x.reshape(groups.elements.shape)
    per_group = groups.per_group(threshold)
    if per_group is None:
        return groups.onto_tensor(_shrink_in_metric(groups, values, groups.onto_elements(threshold)))  # type: ignore[arg-type]
    norms = group_norms(groups, values)
    gains = torch.where(norms <= per_group, 0.0, (norms - per_group) / norms)
    return torch.mul(x, groups.onto_tensor(gains), out=out)


def _shrink_in_metric(groups: Groups, values: Tensor, t: Tensor) -> Tensor:
    """Return ρ·x/(ρ + t) with ρ = ‖u‖₂, the root of ‖x/(ρ + t)‖₂ = 1; 0 where ‖x/t‖₂ ≤ 1."""
    magnitudes = values.abs()
    if groups.sharded or not is_moderate(t, groups.amax(magnitudes)):
        magnitudes = widest(magnitudes)
        scale = group_scales(groups, magnitudes)
        magnitudes, t = magnitudes / scale, (widest(t) / scale).clamp_(min=LEAST[magnitudes.dtype])
    rho = secular_root(magnitudes, t, 1.0, groups)
    return values * (rho / (rho + t))


def _scaled(weight: float, factor: float) -> float:
    """Return the product, rounded to four digits to print short; exactly ``weight`` if the factor is 1."""
    return weight if factor == 1 else float(f"{weight * factor:.4g}")


@dataclass
class GroupL2(SumOverGroups):
    """s·Σ_g ‖x_g‖₂ (ℓ2,1): the group lasso, which makes whole groups exactly zero.

    prox: x_g·max(1 − t/‖x_g‖₂, 0), t = step·s. If the step differs within a group: x_i·ρ/(ρ + t_i) with ρ = ‖u_g‖₂, and
    the group vanishes if ‖x_g/t_g‖₂ ≤ 1.

    Args:
        strength: s ≥ 0.
        dim: the axes that index the groups.

    >>> GroupL2(5.0).prox(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), step=1.0)
    tensor([[0., 0.],
            [3., 4.]])
    """

    strength: NonNegativeFloat
    dim: Dim = 0
    convex: ClassVar[bool] = True

    def _group_values(self, groups: Groups, elements: Tensor) -> Tensor:
        return self.strength * group_norms(groups, elements)

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        return shrink_groups(groups, groups.tensor, step * self.strength, out)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        groups = Groups(x, self.dim)
        norms = groups.onto_tensor(group_norms(groups, groups.elements))
        return torch.where(norms == 0, v - self._prox(v, 1.0, None), self.strength * x / norms)

    def for_larger_groups(self, factor: float) -> Self:
        """Multiply the strength by √factor, because the ℓ2 norm decides whether a group vanishes."""
        return replace(self, strength=_scaled(self.strength, math.sqrt(factor)))

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled().shrink, step * self.strength)

    def metric_kernel(self) -> Kernel | None:
        return self._rows_kernel(in_metric().shrink, self.strength)


@dataclass
class GroupLInf(SumOverGroups):
    """s·Σ_g max|x_g| (ℓ∞,1): makes whole groups exactly zero and clips the largest entries of the others.

    prox: clamp x_g to [−τ, τ] with the τ for which Σ (|x_i| − τ)₊ = t; a group with Σ|x_g| ≤ t = step·s vanishes. If
    the step differs within a group, τ solves Σ (|x_i| − τ)₊/step_i = s.

    Args:
        strength: s ≥ 0.
        dim: the axes that index the groups.

    >>> GroupLInf(2.0).prox(torch.tensor([[0.5, -1.0], [1.0, -4.0]]), step=1.0)
    tensor([[ 0.,  0.],
            [ 1., -2.]])
    """

    strength: NonNegativeFloat
    dim: Dim = 0
    convex: ClassVar[bool] = True

    def _group_values(self, groups: Groups, elements: Tensor) -> Tensor:
        return self.strength * groups.amax(elements.abs())

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        per_group = groups.per_group(step)
        if per_group is not None:
            level = cap(groups.elements.abs(), per_group * self.strength, groups)
        else:
            level = self._level_in_metric(groups, groups.onto_elements(step))  # type: ignore[arg-type]
        level = groups.onto_tensor(level)
        return torch.clamp(groups.tensor, 0.0 - level, level, out=out)  # 0 − 0 is 0 where −0 would be -0.0

    def _level_in_metric(self, groups: Groups, step: Tensor) -> Tensor:
        """Return the τ ≥ 0 of each group with Σ (|x|/t − τ/t)₊ = 1."""
        magnitudes, t = groups.elements.abs(), step * self.strength
        if not groups.sharded and is_moderate(t, groups.amax(magnitudes)):
            inverse = t.reciprocal_()
            return level_in_metric(magnitudes.mul_(inverse), 1.0, groups, inverse).relu_()
        magnitudes = widest(magnitudes)
        scale, least = group_scales(groups, magnitudes), LEAST[magnitudes.dtype]
        inverse = 1 / (widest(step) * self.strength / scale).clamp_(least, 1 / least)
        level = level_in_metric(magnitudes / scale * inverse, 1.0, groups, inverse)
        return (level.relu_() * scale).to(groups.tensor.dtype)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        groups = Groups(x, self.dim)
        magnitudes, values = groups.elements.abs(), groups.onto_elements(v)
        largest = groups.amax(magnitudes)
        top = magnitudes == largest  # convex combinations of the slopes of the largest elements
        uphill = torch.where(top, values * groups.elements.sign(), math.inf)
        lowest = -groups.amax(-uphill)  # elements this far below the others get no share
        shares = project_simplex(torch.where(top, uphill, lowest - self.strength), self.strength, groups)
        slopes = torch.where(top, shares * groups.elements.sign(), 0.0)
        return torch.where(groups.onto_tensor(largest) == 0, v - self._prox(v, 1.0, None), groups.onto_tensor(slopes))

    def for_larger_groups(self, factor: float) -> Self:
        """Multiply the strength by the factor, because the ℓ1 norm decides whether a group vanishes."""
        return replace(self, strength=_scaled(self.strength, factor))

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled().cap, step * self.strength)

    def metric_kernel(self) -> Kernel | None:
        return self._rows_kernel(in_metric().cap, self.strength)


@dataclass
class SparseGroup(SumOverGroups):
    """l1·Σ|x| + group·Σ_g ‖x_g‖₂: whole groups vanish, and single elements of the groups that stay.

    prox: the soft threshold step·l1 on elements, then the prox of group·Σ_g ‖x_g‖₂ as for `GroupL2`.

    Args:
        l1: weight of the absolute values, ≥ 0.
        group: weight of the group norms, ≥ 0.
        dim: the axes that index the groups.

    >>> SparseGroup(l1=1.0, group=5.0).prox(torch.tensor([[4.0, 5.0], [7.0, 9.0], [11.0, 0.5]]), step=1.0)
    tensor([[0., 0.],
            [3., 4.],
            [5., 0.]])
    """

    l1: NonNegativeFloat
    group: NonNegativeFloat
    dim: Dim = 0
    convex: ClassVar[bool] = True

    def _group_values(self, groups: Groups, elements: Tensor) -> Tensor:
        return self.l1 * groups.sum(elements.abs()) + self.group * group_norms(groups, elements)

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        return shrink_groups(groups, soft_threshold(groups.tensor, step * self.l1), step * self.group, out)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        groups = Groups(x, self.dim)
        norms = groups.onto_tensor(group_norms(groups, groups.elements))
        slopes = slope_of_magnitude(x, v, self.l1) + self.group * x / norms
        return torch.where(norms == 0, v - self._prox(v, 1.0, None), slopes)

    def for_larger_groups(self, factor: float) -> Self:
        """Multiply ``group`` by √factor; ``l1`` is for single elements and stays."""
        return replace(self, group=_scaled(self.group, math.sqrt(factor)))

    def kernel(self, step: float) -> Kernel | None:
        return self._rows_kernel(compiled().soft_then_shrink, step * self.group, step * self.l1)

    def metric_kernel(self) -> Kernel | None:
        return self._rows_kernel(in_metric().soft_then_shrink, self.group, self.l1)
