"""How `dim` turns a tensor into groups or into a matrix.

`dim` names the axes that INDEX the groups (or the rows of the matrix); everything else is inside a group (or a column).
Groups are reduced in place, whatever the strides, and reduced axes keep size one, so that a number per group broadcasts
back onto its group.
"""

from __future__ import annotations

import math
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from proxmo import shards
from proxmo.checks import Dim

Step: TypeAlias = float | Tensor
"""A number, a 0-d tensor, or a tensor that broadcasts to x with a step for every element."""


def indexing_axes(x: Tensor, dim: Dim) -> tuple[int, ...]:
    """Return the non-negative axes of ``x`` that ``dim`` names, in increasing order."""
    named = () if dim is None else (dim,) if isinstance(dim, int) else dim
    for axis in named:
        if not -x.dim() <= axis < x.dim():
            raise ValueError(f"dim must name axes of the tensor, got dim={dim} for a tensor of shape {tuple(x.shape)}")
    axes = sorted(axis % x.dim() for axis in named)
    if len(set(axes)) < len(axes):
        raise ValueError(f"dim must name each axis once, got dim={dim} for a tensor of shape {tuple(x.shape)}")
    return tuple(axes)


class Groups:
    """The groups of a tensor, and reductions over them that include the shards of other ranks.

    Reductions take tensors of the shape of ``elements`` and return size one along the axes inside a group. Where the
    elements of a group are sharded, a reduction sends one number per group, never the elements.

    Args:
        x: the tensor.
        dim: the axes that index the groups.

    >>> groups = Groups(torch.tensor([[3.0, -4.0], [0.0, 1.0]]), dim=0)
    >>> groups.sum(groups.elements.abs()).flatten()
    tensor([7., 1.])
    """

    def __init__(self, x: Tensor, dim: Dim) -> None:
        outer, shape = indexing_axes(x, dim), x.shape
        inner = tuple([axis for axis in range(len(shape)) if axis not in outer])
        split = shards.splits(x)
        self.tensor = shards.local(x)
        """The local shard of the tensor."""
        # If each element is a group of its own, add an axis of size one: torch takes a reduction over no axes as one
        # over all of them.
        self.elements = self.tensor if inner else self.tensor.unsqueeze(-1)
        self.axes = inner or (len(shape),)
        self.length = prod([shape[axis] for axis in inner])
        """How many elements a group has."""
        self.sharded = [process_group for axis, process_group in split if axis in inner]
        """The process groups over which the elements of a group are sharded."""
        self.apart = [process_group for axis, process_group in split if axis in outer]
        """The process groups over which whole groups are sharded."""

    @property
    def reduced_shape(self) -> list[int]:
        """The shape of what reductions return."""
        return [1 if axis in self.axes else size for axis, size in enumerate(self.elements.shape)]

    def onto_tensor(self, values: Tensor) -> Tensor:
        """Reshape ``values``, which fit ``elements``, to fit ``tensor``."""
        return values if self.elements is self.tensor else values.squeeze(-1)

    def onto_elements(self, values: Tensor) -> Tensor:
        """Expand ``values``, which broadcast to ``tensor``, to the shape of ``elements``."""
        values = values.expand(self.tensor.shape)
        return values if self.elements is self.tensor else values.unsqueeze(-1)

    def per_group(self, step: Step) -> Step | None:
        """Return ``step`` with one number per group, to fit a reduction; ``None`` if it differs within groups.

        The values are not read: it is the same within a group if it was broadcast along the axes inside.
        """
        if not isinstance(step, Tensor) or step.dim() == 0:
            return step
        full = self.onto_elements(step)
        if self.sharded or any(full.stride(axis) and full.shape[axis] > 1 for axis in self.axes):
            return None
        for axis in self.axes:
            full = full.narrow(axis, 0, min(1, full.shape[axis]))
        return full

    def sum_over_ranks(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Turn sums over the local elements of each group into sums over all of them, in one message."""
        return shards.sum_over_ranks(torch.stack(sums), self.sharded).unbind() if self.sharded else sums

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over each group."""
        return self.sum_over_ranks(values.sum(self.axes, keepdim=True))[0]

    def amax(self, values: Tensor) -> Tensor:
        """Return the largest value of each group; NaN if it has one."""
        if self.sharded and values.numel() == 0:  # the local shard is empty, that of another rank is not
            return shards.max_over_ranks(values.new_full(self.reduced_shape, -math.inf), self.sharded)
        return shards.max_over_ranks(values.amax(self.axes, keepdim=True), self.sharded)

    def total(self, per_group: Tensor) -> Tensor:
        """Return the sum of a number per group over all groups."""
        return shards.sum_over_ranks(per_group.sum(), self.apart)

    def every(self, per_group: Tensor) -> Tensor:
        """Whether a condition per group holds for all groups."""
        return self.total(~per_group) == 0 if self.apart else per_group.all()


def as_rows(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Flatten the elements of ``x`` along ``axes`` into one last axis."""
    last = tuple(range(x.dim() - len(axes), x.dim()))
    return x.movedim(axes, last).flatten(last[0])


def as_matrix(x: Tensor, dim: Dim) -> Tensor:
    """Return ``x`` as a matrix: the axes in ``dim`` are its rows, the others its columns."""
    rows = indexing_axes(x, dim)
    return x.movedim(rows, tuple(range(len(rows)))).reshape(prod([x.shape[axis] for axis in rows]), -1)


def from_matrix(matrix: Tensor, like: Tensor, dim: Dim) -> Tensor:
    """Undo `as_matrix` for a tensor of the shape of ``like``."""
    rows = indexing_axes(like, dim)
    first = tuple(range(len(rows)))
    return matrix.reshape(like.movedim(rows, first).shape).movedim(first, rows)
