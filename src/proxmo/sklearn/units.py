"""Penalties in the units of the data, for methods that work on scaled weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxmo.penalties import Penalty
from proxmo.penalties.axes import Step


@dataclass
class InUnits(Penalty):
    """ψ(v·unit) as a function of v: a penalty on weights w = v·unit, for a method that works on v.

    prox: that of ψ in the metric of w, prox(v) = prox_{step·unit²}(v·unit)/unit, which is exact.

    Args:
        penalty: ψ; with units that differ between elements, one whose prox takes a step for each.
        units: for each tensor of the parameter group a tensor that broadcasts to it.

    >>> import torch, proxmo
    >>> InUnits(proxmo.L1(1.0), [torch.tensor([1.0, 10.0])]).prox(torch.tensor([3.0, 3.0]), step=0.1)
    tensor([2.9000, 2.0000])
    """

    penalty: Penalty
    units: Sequence[Tensor]
    convex: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    elementwise_step: ClassVar[bool] = True

    @property
    def joint(self) -> bool:
        """Units belong to tensors by their position, so all tensors are handed over together."""
        return True

    def total(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.penalty.total([v * unit for v, unit in zip(tensors, self.units, strict=True)])

    def value(self, x: Tensor) -> Tensor:
        return self.total([x])

    def prox_(self, tensors: list[Tensor], step: Step | list[Tensor], others: Sequence[Tensor] = ()) -> None:
        steps = step if isinstance(step, list) else [step] * len(tensors)
        weights = [v * unit for v, unit in zip(tensors, self.units, strict=True)]
        in_metric = [one * unit.square() for one, unit in zip(steps, self.units, strict=True)]
        self.penalty.prox_(weights, in_metric)
        for v, weight, unit in zip(tensors, weights, self.units, strict=True):
            v.copy_(weight.div_(unit))

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        result = x.clone() if out is None else out.copy_(x)
        self.prox_([result], step)
        return result

    def check(self, x: Tensor) -> None:
        self.penalty.check(x)

    def check_blocks(self, count: int) -> None:
        self.penalty.check_blocks(count)

    def block_shape(self, x: Tensor) -> tuple[int, ...]:
        return self.penalty.block_shape(x)

    def zero_groups(self, x: Tensor) -> tuple[int, int] | None:
        return self.penalty.zero_groups(x)
