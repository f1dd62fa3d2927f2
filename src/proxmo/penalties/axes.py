"""How `dim` turns a tensor into groups or into a matrix.

`dim` names the axes that INDEX the groups (or the rows of the matrix); everything else is inside a group (or a column).
Groups are never copied together: they are reduced where they lie, whatever the strides, with the reduced axes kept as
size one, so that a per-group number broadcasts back onto its group.
"""

from __future__ import annotations

import math
from math import prod

import torch
from torch import Tensor

from proxmo import shards
from proxmo.checks import Dim


def indexing_axes(x: Tensor, dim: Dim) -> tuple[int, ...]:
    """The non-negative axes of ``x`` that ``dim`` names, in increasing order."""
    if isinstance(dim, int) and -x.dim() <= dim < x.dim():  # in short, since it is asked for in every step
        return (dim % x.dim(),)
    named = () if dim is None else (dim,) if isinstance(dim, int) else dim
    for axis in named:
        if not -x.dim() <= axis < x.dim():
            raise ValueError(f"dim must name axes of the tensor, got dim={dim} for a tensor of shape {tuple(x.shape)}")
    axes = sorted(axis % x.dim() for axis in named)
    if len(set(axes)) < len(axes):
        raise ValueError(f"dim must name each axis once, got dim={dim} for a tensor of shape {tuple(x.shape)}")
    return tuple(axes)


class Groups:
    """The groups of a tensor, and reductions over them, which also reach the elements that other processes hold.

    What is reduced has the shape of ``elements``; a result has size one along the axes inside a group. Where groups
    are divided among processes, each reduction sends its per-group numbers, never the elements.

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
        """What this process holds of the tensor."""
        # Where each element is a group of its own there is one more axis, of size one: a reduction over no axes would
        # in torch mean over all of them.
        self.elements = self.tensor if inner else self.tensor.unsqueeze(-1)
        self.axes = inner or (len(shape),)
        self.length = prod([shape[axis] for axis in inner])
        """How many elements a group has."""
        self.divided = [processes for axis, processes in split if axis in inner]
        """Among which processes the elements of a group are divided."""
        self._apart = [processes for axis, processes in split if axis in outer]

    def onto_tensor(self, values: Tensor) -> Tensor:
        """What has the shape of ``elements``, or of a reduction of them, in a shape that fits ``tensor``."""
        return values if self.elements is self.tensor else values.squeeze(-1)

    def add_up(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Per-group sums over the elements of this process, turned into those over all elements, in one message."""
        return shards.add_up(torch.stack(sums), self.divided).unbind() if self.divided else sums

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each group."""
        return self.add_up(values.sum(self.axes, keepdim=True))[0]

    def amax(self, values: Tensor) -> Tensor:
        """The largest value of each group; NaN if it has one."""
        if self.divided and values.numel() == 0:  # the part of this process; that of another is not empty
            shape = [1 if axis in self.axes else size for axis, size in enumerate(values.shape)]
            return shards.largest(values.new_full(shape, -math.inf), self.divided)
        return shards.largest(values.amax(self.axes, keepdim=True), self.divided)

    def total(self, per_group: Tensor) -> Tensor:
        """The sum of per-group numbers over all groups."""
        return shards.add_up(per_group.sum(), self._apart)

    def every(self, per_group: Tensor) -> Tensor:
        """Whether something holds for all groups."""
        return self.total(~per_group) == 0 if self._apart else per_group.all()


def as_rows(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``x`` with the elements along ``axes`` flattened into one last axis."""
    last = tuple(range(x.dim() - len(axes), x.dim()))
    if axes != last:
        x = x.movedim(axes, last)
    return x if len(axes) == 1 else x.flatten(last[0])


def as_matrix(x: Tensor, dim: Dim) -> Tensor:
    """``x`` as a matrix: the axes in ``dim`` are its rows, the others its columns."""
    rows = indexing_axes(x, dim)
    if rows == (0,) and x.dim() == 2:
        return x
    first = tuple(range(len(rows)))
    return (x if rows == first else x.movedim(rows, first)).reshape(prod([x.shape[axis] for axis in rows]), -1)


def from_matrix(matrix: Tensor, like: Tensor, dim: Dim) -> Tensor:
    """The inverse of :func:`as_matrix` for a tensor of the shape of ``like``."""
    rows = indexing_axes(like, dim)
    first = tuple(range(len(rows)))
    if rows == first:
        return matrix if matrix.shape == like.shape else matrix.reshape(like.shape)
    return matrix.reshape(like.movedim(rows, first).shape).movedim(first, rows)
