"""Penalties that make whole groups vanish: rows, neurons, channels.

A group is everything that shares its index along the axes `dim`: with `dim=0` on a Linear or Conv weight, all weights
into one output neuron or channel. In formulas x_g is a group, s the strength and t = step·s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proxmo.penalties.axes import as_groups
from proxmo.penalties.base import Dim, Grouped, NonNegativeFloat
from proxmo.penalties.elementwise import soft_threshold
from proxmo.penalties.thresholds import cap


def group_norms(view: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The Euclidean norm over ``axes``, which stay as axes of size one.

    Scaled by the largest element, so that squares neither overflow nor vanish. Not `torch.linalg.vector_norm`: in
    float32 it loses digits with the length of the group (1% at 10⁷ elements on a CPU), sums do not.
    """
    magnitudes = view.abs()
    largest = magnitudes.detach().amax(axes, keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    squares = (magnitudes / scale).square().sum(axes, keepdim=True)
    zero = squares == 0  # where the square root has no slope; autograd then gives 0, a subgradient
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt()) * scale


def shrink_groups(x: Tensor, dim: Dim, threshold: float | Tensor, out: Tensor | None) -> Tensor:
    """x_g·max(1 − threshold/‖x_g‖₂, 0) for each group."""
    view, axes = as_groups(x, dim)
    norms = group_norms(view, axes)
    gain = torch.where(norms <= threshold, 0.0, (norms - threshold) / norms)
    return torch.mul(x, gain.squeeze(-1), out=out)


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

    def _value(self, x: Tensor) -> Tensor:
        return self.strength * group_norms(*as_groups(x, self.dim)).sum()

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return shrink_groups(x, self.dim, step * self.strength, out)


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

    def _value(self, x: Tensor) -> Tensor:
        view, axes = as_groups(x, self.dim)
        return self.strength * view.abs().amax(axes).sum()

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        view, axes = as_groups(x, self.dim)
        level = cap(view.abs(), step * self.strength, axes).squeeze(-1)
        return torch.clamp(x, 0.0 - level, level, out=out)  # 0 − 0 is 0 where −0 would be -0.0


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

    def _value(self, x: Tensor) -> Tensor:
        return self.l1 * x.abs().sum() + self.group * group_norms(*as_groups(x, self.dim)).sum()

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return shrink_groups(soft_threshold(x, step * self.l1), self.dim, step * self.group, out)
