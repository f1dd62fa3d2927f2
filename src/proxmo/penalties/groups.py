"""Penalties that make whole groups vanish: rows, neurons, channels.

A group is everything that shares its index along the axes `dim`: with `dim=0` on a Linear or Conv weight, all weights
into one output neuron or channel. In formulas x_g is a group, s the strength and t = step·s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proxmo.parts import is_at_hand
from proxmo.penalties.axes import Groups
from proxmo.penalties.base import Dim, Grouped, NonNegativeFloat
from proxmo.penalties.elementwise import soft_threshold
from proxmo.penalties.thresholds import cap

_FEW_ELEMENTS = 1 << 16  # of which a copy in float64 takes little time


def group_norms(groups: Groups, values: Tensor) -> Tensor:
    """The Euclidean norm of ``values`` over each group.

    Squares might overflow or vanish: few elements are squared in float64, many are scaled if need be. Not
    `torch.linalg.vector_norm` of many in float32: it loses digits with the length of the group (1% at 10⁷ elements on
    a CPU), sums do not.
    """
    if not is_at_hand(values) or groups.divided:
        return _scaled_norms(groups, values)
    if values.dtype == torch.float32 and values.numel() <= _FEW_ELEMENTS:
        wide: Tensor = torch.linalg.vector_norm(values, 2, groups.axes, keepdim=True, dtype=torch.float64)
        return wide.float()
    numbers = torch.finfo(values.dtype)
    squares = groups.sum(values.square())
    has_digits = (squares > groups.length * numbers.tiny / numbers.eps) & (squares < numbers.max)
    norms = squares.sqrt()
    return norms if bool(has_digits.all()) else torch.where(has_digits, norms, _scaled_norms(groups, values))


def _scaled_norms(groups: Groups, values: Tensor) -> Tensor:
    """Each group is scaled by its largest element; differentiable."""
    magnitudes = values.abs()
    largest = groups.amax(magnitudes.detach())
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    if magnitudes.requires_grad:
        squares = groups.sum((magnitudes / scale).square())
    else:
        squares = groups.sum(magnitudes.div_(scale).square_())  # without buffers, which take longer than the numbers
    zero = squares == 0  # where the square root has no slope; autograd then gives 0, a subgradient
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt()) * scale


def shrink_groups(groups: Groups, x: Tensor, threshold: float | Tensor, out: Tensor | None) -> Tensor:
    """x_g·max(1 − threshold/‖x_g‖₂, 0) for each group of ``x``."""
    norms = groups.onto_tensor(group_norms(groups, x.reshape(groups.elements.shape)))
    return torch.mul(x, torch.where(norms <= threshold, 0.0, (norms - threshold) / norms), out=out)


@dataclass
class GroupL2(Grouped):
    """s·Σ_g ‖x_g‖₂ (ℓ2,1): the group lasso, which makes whole groups exactly zero.

    prox: x_g·max(1 − t/‖x_g‖₂, 0), t = step·s.

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
    separable: ClassVar[bool] = False
    sum_over_groups: ClassVar[bool] = True

    def _value(self, x: Tensor) -> Tensor:
        groups = Groups(x, self.dim)
        return self.strength * groups.total(group_norms(groups, groups.elements))

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        return shrink_groups(groups, groups.tensor, step * self.strength, out)


@dataclass
class GroupLInf(Grouped):
    """s·Σ_g max|x_g| (ℓ∞,1): makes whole groups exactly zero and leaves the others flat at the top.

    prox: cut x_g at ±τ, where what is cut off adds up to t; a group with Σ|x_g| ≤ t = step·s vanishes.

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
    separable: ClassVar[bool] = False
    sum_over_groups: ClassVar[bool] = True

    def _value(self, x: Tensor) -> Tensor:
        groups = Groups(x, self.dim)
        return self.strength * groups.total(groups.amax(groups.elements.abs()))

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        level = groups.onto_tensor(cap(groups.elements.abs(), step * self.strength, groups))
        return torch.clamp(groups.tensor, 0.0 - level, level, out=out)  # 0 − 0 is 0 where −0 would be -0.0


@dataclass
class SparseGroup(Grouped):
    """l1·Σ|x| + group·Σ_g ‖x_g‖₂: whole groups vanish, and elements within the groups that stay.

    prox: the soft threshold step·l1 on elements, then x_g·max(1 − step·group/‖x_g‖₂, 0).

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
    separable: ClassVar[bool] = False
    sum_over_groups: ClassVar[bool] = True

    def _value(self, x: Tensor) -> Tensor:
        groups = Groups(x, self.dim)
        norms = group_norms(groups, groups.elements)
        return groups.total(self.l1 * groups.sum(groups.elements.abs()) + self.group * norms)

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        groups = Groups(x, self.dim)
        return shrink_groups(groups, soft_threshold(groups.tensor, step * self.l1), step * self.group, out)
