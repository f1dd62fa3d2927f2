"""Kinds of penalties: sums over elements, sums over groups, and constraints.

Their base classes say how such penalties are evaluated, ranked, stacked and sharded, so that a penalty has to give
little more than its formulas.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from proxmo import shards
from proxmo.kernels import Kernel
from proxmo.penalties.axes import Groups, Step, indexing_axes
from proxmo.penalties.base import Dim, Penalty, rounding_slack


class Elementwise(Penalty):
    """A penalty that is a sum over elements, with a prox that accepts a step for each."""

    separable: ClassVar[bool] = True
    elementwise_step: ClassVar[bool] = True

    def _element_values(self, x: Tensor) -> Tensor:
        """Return the value of each element."""
        raise NotImplementedError(f"{type(self).__name__} must define _element_values or _value")

    def _value(self, x: Tensor) -> Tensor:
        return self._element_values(x).sum()


class Shrinkage(Elementwise):
    """A sum over elements that is even and does not fall as |x| grows: elements are ranked by their magnitude."""


class WithDim(Penalty):
    """A penalty whose field ``dim`` names axes, which a tensor must have."""

    dim: Dim

    def check(self, x: Tensor) -> None:
        indexing_axes(x, self.dim)


class Grouped(WithDim):
    """A penalty whose ``dim`` names the axes that index its groups; ``None`` makes the whole tensor one group.

    Its hooks read ``x`` through `Groups`, whose reductions include the shards of other ranks: nothing is gathered.
    """

    sum_over_groups: ClassVar[bool] = False
    """Whether ψ is a sum over groups; then its prox acts on each group alone."""

    def zero_groups(self, x: Tensor) -> tuple[int, int] | None:
        if self.dim is None:
            return None
        groups = Groups(x, self.dim)
        count = math.prod([x.shape[axis] for axis in indexing_axes(x, self.dim)])
        return int(groups.total(groups.sum(groups.elements != 0) == 0)), count

    def takes_units(self) -> bool:
        return self.dim == 0

    def for_larger_groups(self, factor: float) -> Self:
        """Return a penalty that is as strong on groups with ``factor`` times as many elements as this one is now.

        "As strong" means: if a group is repeated ``factor`` times, its prox is the repeated prox. `unit_groups` uses
        this to balance large and small units. A penalty that does not override it has the same strength for groups of
        all sizes.
        """
        return self

    def block_shape(self, x: Tensor) -> tuple[int, ...]:
        if self.separable or not self.sum_over_groups:
            return super().block_shape(x)
        outer = indexing_axes(x, self.dim)
        return tuple(size if axis in outer else 1 for axis, size in enumerate(x.shape))

    def _stacked(self, x: Tensor) -> Penalty | None:
        if self.separable or not self.sum_over_groups or not self._has_number_fields():
            return super()._stacked(x)
        stacked = copy.copy(self)
        stacked.dim = (0, *(axis + 1 for axis in indexing_axes(x, self.dim)))
        return stacked

    def acts_on_rows(self, x: Tensor) -> bool:
        alone = self.separable or (self.sum_over_groups and 0 in indexing_axes(x, self.dim))
        return alone and self._has_number_fields()

    def _seen(self, x: Tensor) -> Tensor:
        return shards.local(x) if self.separable else x

    def _rows_kernel(self, function: Any, *constants: float) -> Kernel | None:
        """Return a kernel that takes group by group, if groups are rows along the first axis or whole tensors."""
        if self.dim in (0, (0,)):
            return Kernel(function, constants, per="row")
        return Kernel(function, constants, per="tensor") if self.dim in (None, ()) else None


class SumOverGroups(Grouped):
    """A penalty that is a sum over groups, with a prox that accepts a step for every element."""

    separable: ClassVar[bool] = False
    elementwise_step: ClassVar[bool] = True
    sum_over_groups: ClassVar[bool] = True

    def _group_values(self, groups: Groups, elements: Tensor) -> Tensor:
        """Return the value of each group, with ``elements`` in place of those of ``groups``."""
        raise NotImplementedError(f"{type(self).__name__} must define _group_values or _value")

    def _value(self, x: Tensor) -> Tensor:
        groups = Groups(x, self.dim)
        return groups.total(self._group_values(groups, groups.elements))


class Constraint(Penalty):
    """The indicator of a set: the value is 0 inside and +inf outside, so the prox is a projection for every step.

    A point counts as inside if it violates the constraint by rounding only, so that a projected point is inside (unless
    its entries are too small for the full precision of their dtype).
    Subclasses write ``_inside(x, slack)``, with ``slack`` the relative violation that rounding explains, and
    ``_project(x, out)``.

    >>> import proxmo
    >>> isinstance(proxmo.Simplex(), proxmo.Constraint)
    True
    """

    def value(self, x: Tensor) -> Tensor:
        def indicator(seen: Tensor) -> Tensor:
            return torch.where(self._inside(seen, rounding_slack(x)), 0.0, math.inf).to(seen.dtype)

        return self._evaluate(x, indicator)

    def _has_subgradient(self, x: Tensor) -> bool:
        return bool(x.isnan().any() or self.value(x) == 0)

    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        return self._project(x, out)

    @abstractmethod
    def _inside(self, x: Tensor, slack: float) -> Tensor:
        """Return a 0-d bool tensor; false if ``x`` has a NaN."""

    @abstractmethod
    def _project(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return the projection: in ``out``, which may be ``x``, or in a new tensor."""
