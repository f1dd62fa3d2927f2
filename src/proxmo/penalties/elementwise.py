"""Penalties that are a sum over elements.

In formulas x is one element, s the strength and t = step·s; a step for every element needs no other formula. Where a
penalty is not convex its prox jumps, and the form of the jump depends on the step. `torch.where(|x| <= …, 0, x)` keeps
NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from proxmo.kernels import Kernel
from proxmo.penalties.axes import Step
from proxmo.penalties.base import FloatAboveOne, NonNegativeFloat, PositiveFloat
from proxmo.penalties.kinds import Shrinkage
from proxmo.penalties.thresholds import fit

# Imported with numba, when a kernel is asked for.
compiled = partial(import_module, "proxmo.penalties.compiled_elements")
in_metric = partial(import_module, "proxmo.penalties.compiled_metric")


def soft_threshold(x: Tensor, threshold: float | Tensor, out: Tensor | None = None) -> Tensor:
    """Return sign(x)·max(|x| − threshold, 0)."""
    threshold = fit(threshold, x.dtype)
    if isinstance(threshold, Tensor):
        return torch.sub(x, torch.clamp(x, -threshold, threshold), out=out)
    # one pass and no temporary: several times faster than the line above on large tensors
    return torch._C._nn.softshrink(x, threshold, out=out)  # type: ignore[call-arg]


def slope_of_magnitude(x: Tensor, v: Tensor, weight: float) -> Tensor:
    """Return the subgradient of weight·Σ|x| that is nearest to ``v``."""
    return torch.where(x == 0, v.clamp(-weight, weight), weight * x.sign())


def choose(condition: bool | Tensor, yes: float | Tensor, no: float | Tensor) -> float | Tensor:
    """Return ``yes if condition else no`` for numbers or tensors."""
    if isinstance(condition, Tensor):
        dtype = torch.float32 if condition.device.type == "mps" else torch.float64
        wide = condition.new_zeros((), dtype=dtype)
        return torch.where(condition, wide + yes, wide + no)
    return yes if condition else no


def shrink_in_pieces(x: Tensor, constants: tuple[Any, ...], out: Tensor | None) -> Tensor:
    """Return the prox of MCP and SCAD: the soft threshold t up to ``soft_until``, x itself beyond ``flat_from``.

    Between them it is sign(x)·(|x| − slope·(corner − |x|)), clamped to magnitudes from ``lowest`` to |x|: the slope may
    be so steep that it blows up rounding errors.
    """
    t, soft_until, flat_from, corner, slope, lowest = constants
    magnitude = x.abs()
    moved = magnitude - (fit(corner, x.dtype) - magnitude) * slope
    bent = torch.minimum(moved.clamp_(min=fit(lowest, x.dtype)), magnitude).copysign_(x)
    large = torch.where(magnitude <= flat_from, bent, x)
    return torch.where(magnitude <= soft_until, soft_threshold(x, t), large, out=out)


@dataclass
class L1(Shrinkage):
    """s·Σ|x|: the lasso, which makes elements exactly zero.

    prox: sign(x)·max(|x| − t, 0), t = step·s.

    Args:
        strength: s ≥ 0.

    >>> L1(1.0).prox(torch.tensor([0.3, -2.0]), step=0.5)
    tensor([ 0.0000, -1.5000])
    """

    strength: NonNegativeFloat
    convex: ClassVar[bool] = True

    def _element_values(self, x: Tensor) -> Tensor:
        return self.strength * x.abs()

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        return soft_threshold(x, step * self.strength, out)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        return slope_of_magnitude(x, v, self.strength)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled().soft, (step * self.strength,))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().soft, (self.strength,))


@dataclass
class SquaredL2(Shrinkage):
    """s/2·Σx²: weight decay as a penalty, with an implicit step that is stable for every strength.

    prox: x / (1 + t), t = step·s.

    Args:
        strength: s ≥ 0.

    >>> SquaredL2(3.0).prox(torch.tensor([4.0]), step=1.0)
    tensor([1.])
    """

    strength: NonNegativeFloat
    convex: ClassVar[bool] = True

    def _element_values(self, x: Tensor) -> Tensor:
        return (x * math.sqrt(self.strength / 2)).square()  # x² alone may overflow where s·x² does not

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        return torch.div(x, 1 + step * self.strength, out=out)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        return self.strength * x

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled().divide, (1 + step * self.strength,))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().divide, (self.strength,))


@dataclass
class ElasticNet(Shrinkage):
    """l1·Σ|x| + l2/2·Σx²: exact zeros and shrinkage together.

    prox: sign(x)·max(|x| − step·l1, 0) / (1 + step·l2).

    Args:
        l1: weight of the absolute values, ≥ 0.
        l2: weight of the squares, ≥ 0.

    >>> ElasticNet(l1=1.0, l2=1.0).prox(torch.tensor([0.5, 4.0]), step=1.0)
    tensor([0.0000, 1.5000])
    """

    l1: NonNegativeFloat
    l2: NonNegativeFloat
    convex: ClassVar[bool] = True

    def _element_values(self, x: Tensor) -> Tensor:
        return self.l1 * x.abs() + (x * math.sqrt(self.l2 / 2)).square()

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        return soft_threshold(x, step * self.l1, out).div_(1 + step * self.l2)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        return slope_of_magnitude(x, v, self.l1) + self.l2 * x

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled().elastic, (step * self.l1, 1 + step * self.l2))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().elastic, (self.l1, self.l2))


@dataclass
class Huber(Shrinkage):
    """s·Σ h(x), h = x²/2 for |x| ≤ δ and δ(|x| − δ/2) beyond: quadratic near zero, linear far away.

    prox: x / (1 + t) for |x| ≤ δ(1 + t), x − sign(x)·t·δ beyond; t = step·s.

    Args:
        strength: s ≥ 0.
        delta: δ > 0, where the quadratic turns into a line.

    >>> Huber(1.0, delta=1.0).prox(torch.tensor([1.0, 5.0]), step=1.0)
    tensor([0.5000, 4.0000])
    """

    strength: NonNegativeFloat
    delta: PositiveFloat
    convex: ClassVar[bool] = True

    def _element_values(self, x: Tensor) -> Tensor:
        magnitude = x.abs()
        core = magnitude.clamp(max=fit(self.delta, x.dtype))
        return self.strength * core * (magnitude - core / 2)

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        t = step * self.strength
        return torch.where(x.abs() <= self.delta * (1 + t), x / (1 + t), soft_threshold(x, t * self.delta), out=out)

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        return self.strength * x.clamp(-self.delta, self.delta)

    def kernel(self, step: float) -> Kernel:
        t = step * self.strength
        return Kernel(compiled().huber, (t * self.delta, self.delta * (1 + t), 1 + t))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().huber, (self.strength, self.delta))


@dataclass
class L0(Shrinkage):
    """s·(number of non-zeros): a fixed cost for each element that is not zero, however large.

    prox: 0 for |x| ≤ √(2t), else x; t = step·s.

    Args:
        strength: s ≥ 0.

    >>> L0(1.0).prox(torch.tensor([1.0, -2.0]), step=1.0)
    tensor([ 0., -2.])
    """

    strength: NonNegativeFloat
    convex: ClassVar[bool] = False

    def _element_values(self, x: Tensor) -> Tensor:
        return torch.where(x == 0, 0.0, torch.ones_like(x) * self.strength)

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        threshold = fit(math.sqrt(2 * self.strength) * step**0.5, x.dtype)  # so that inf stays above it
        return torch.where(x.abs() <= threshold, x.new_zeros(()), x, out=out)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled().hard, (math.sqrt(2 * self.strength) * math.sqrt(step),))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().hard, (math.sqrt(2 * self.strength),))


@dataclass
class MCP(Shrinkage):
    """Minimax concave penalty: Σ(s|x| − x²/(2c)) up to |x| = c·s, constant c·s²/2 beyond: spares large weights.

    prox for step < c: sign(x)·max(|x| − step·s, 0) / (1 − step/c) for |x| ≤ c·s, else x;
    for step ≥ c the subproblem is concave in between and the prox jumps: 0 for |x| ≤ s·√(c·step), else x.

    It is better than ℓ1 if few coefficients are large: these are not shrunk, so the strength can be as large as the
    zeros need. Start with the strength that works for ℓ1, then raise it. The penalty is flat beyond c·s and does not
    pull larger weights to zero. The default suits regressions on standardised features. In networks, strengths are far
    below the weights: choose c so that c·s is the size of the weights to keep, such as ``MCP(0.01, concavity=30)``.

    Args:
        strength: s ≥ 0, the slope at zero.
        concavity: c > 0; the larger, the closer to ℓ1. 3 is customary.

    >>> MCP(1.0).prox(torch.tensor([0.5, 2.0, 4.0]), step=1.0)
    tensor([0.0000, 1.5000, 4.0000])
    """

    strength: NonNegativeFloat
    concavity: PositiveFloat = 3.0
    convex: ClassVar[bool] = False

    def _element_values(self, x: Tensor) -> Tensor:
        magnitude = x.abs().clamp(max=fit(self.concavity * self.strength, x.dtype))
        return magnitude * (self.strength - magnitude / (2 * self.concavity))

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        return shrink_in_pieces(x, self._constants(step), out)

    def _constants(self, step: Any) -> tuple[Any, ...]:
        s, c = self.strength, self.concavity
        gentle = step < c
        threshold = choose(gentle, step * s, s * (c * step) ** 0.5)
        slope = choose(gentle, step / choose(gentle, c - step, 1.0), 0.0)
        return threshold, threshold, choose(gentle, c * s, threshold), c * s, slope, 0.0

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled().in_pieces, self._constants(step))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().mcp, (self.strength, self.concavity))


@dataclass
class SCAD(Shrinkage):
    """Smoothly clipped absolute deviation: slope s up to |x| = s, then falling to 0 at |x| = a·s, constant beyond.

    prox, t = step·s: for step < a − 1 soft threshold t for |x| ≤ s(1 + step), ((a−1)x − sign(x)·a·t)/(a − 1 − step) for
    |x| ≤ a·s, else x; for a larger step it jumps from the soft threshold to x, at |x| = s(a + 1 + step)/2 while
    step ≤ a + 1 and at s·√((a + 1)·step) beyond.

    Like `MCP`, it is better than ℓ1 if few coefficients are large. Choose strength and scale in the same way: the
    penalty is flat beyond a·s, so for networks a must be far above its default.

    Args:
        strength: s ≥ 0, the slope at zero.
        concavity: a > 1; 3.7 is the choice of Fan and Li (2001).

    >>> SCAD(1.0).prox(torch.tensor([0.5, 1.5, 4.0]), step=1.0)
    tensor([0.0000, 0.5000, 4.0000])
    """

    strength: NonNegativeFloat
    concavity: FloatAboveOne = 3.7
    convex: ClassVar[bool] = False

    def _element_values(self, x: Tensor) -> Tensor:
        s, a = self.strength, self.concavity
        magnitude, corner = x.abs(), fit(s, x.dtype)
        rising = torch.where(magnitude > corner, corner, magnitude)  # clamp has derivative 0 at s from torch 2.15 on
        bending = (magnitude.clamp(max=fit(a * s, x.dtype)) - s).relu()
        return s * rising + bending * (s - bending / (2 * (a - 1)))

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        return shrink_in_pieces(x, self._constants(step), out)

    def _constants(self, step: Any) -> tuple[Any, ...]:
        s, a = self.strength, self.concavity
        gentle = step < a - 1
        jump = choose(step <= a + 1, s * (a + 1 + step) / 2, s * ((a + 1) * step) ** 0.5)
        slope = choose(gentle, step / choose(gentle, a - 1 - step, 1.0), 0.0)
        return step * s, choose(gentle, s * (1 + step), jump), choose(gentle, a * s, jump), a * s, slope, s

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled().in_pieces, self._constants(step))

    def metric_kernel(self) -> Kernel:
        return Kernel(in_metric().scad, (self.strength, self.concavity))


@dataclass
class LHalf(Shrinkage):
    """s·Σ√|x|: between ℓ0 and ℓ1, sparser than ℓ1 and with a closed prox.

    prox: 0 for |x| ≤ θ = (54^⅓/4)·(2t)^⅔, else ⅔·x·(1 + cos(2π/3 − ⅔·arccos((θ/|x|)^1.5/√2)));
    t = step·s.

    Args:
        strength: s ≥ 0.

    >>> LHalf(1.0).prox(torch.tensor([1.0, 4.0]), step=1.0)
    tensor([0.0000, 3.7415])
    """

    strength: NonNegativeFloat
    convex: ClassVar[bool] = False

    def _element_values(self, x: Tensor) -> Tensor:
        zero = x == 0  # where the slope is infinite; autograd then gives 0, a subgradient
        return torch.where(zero, 0.0, self.strength * torch.where(zero, 1.0, x.abs()).sqrt())

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        threshold = fit(self._threshold(step), x.dtype)
        magnitude = x.abs()
        angle = (magnitude / threshold).pow_(-1.5).mul_(math.sqrt(0.5)).acos_()
        root = angle.mul_(-2 / 3).add_(2 * math.pi / 3).cos_().add_(1).mul_(2 / 3).mul_(x)
        return torch.where(magnitude <= threshold, x.new_zeros(()), root, out=out)

    def _threshold(self, step: Any) -> Any:
        return 54 ** (1 / 3) / 4 * (2 * self.strength) ** (2 / 3) * step ** (2 / 3)

    def kernel(self, step: float) -> Kernel:
        return Kernel(compiled().half, (self._threshold(step), -1.5, math.sqrt(0.5), 2 / 3, 2 * math.pi / 3, 1.0))

    def metric_kernel(self) -> Kernel:
        return self.kernel(1.0)._replace(function=in_metric().half)
