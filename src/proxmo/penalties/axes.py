"""How `dim` turns a tensor into groups or into a matrix.

`dim` names the axes that INDEX the groups (or the rows of the matrix); everything else is inside a group (or a column).
Groups are never copied together: they are reduced where they lie, whatever the strides, with the reduced axes kept as
size one, so that a per-group number broadcasts back onto its group.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from proxmo.checks import Dim


def indexing_axes(x: Tensor, dim: Dim) -> tuple[int, ...]:
    """The non-negative axes of ``x`` that ``dim`` names, in increasing order."""
    named = () if dim is None else (dim,) if isinstance(dim, int) else dim
    for axis in named:
        if not -x.dim() <= axis < x.dim():
            raise ValueError(f"dim must name axes of the tensor, got dim={dim} for a tensor of shape {tuple(x.shape)}")
    axes = sorted(axis % x.dim() for axis in named)
    if len(set(axes)) < len(axes):
        raise ValueError(f"dim must name each axis once, got dim={dim} for a tensor of shape {tuple(x.shape)}")
    return tuple(axes)


def as_groups(x: Tensor, dim: Dim) -> tuple[Tensor, tuple[int, ...]]:
    """A view of ``x`` and the axes of the view that lie inside a group.

    The view has one more axis of size one at the end: so there is always an axis inside the group, even when each
    element is a group of its own, where a reduction over no axes would in torch mean over all of them.
    """
    outer = indexing_axes(x, dim)
    inner = tuple(axis for axis in range(x.dim()) if axis not in outer)
    return x.unsqueeze(-1), (*inner, x.dim())


def as_rows(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``x`` with the elements along ``axes`` flattened into one last axis."""
    last = tuple(range(x.dim() - len(axes), x.dim()))
    return x.movedim(axes, last).flatten(last[0])


def as_matrix(x: Tensor, dim: Dim) -> Tensor:
    """``x`` as a matrix: the axes in ``dim`` are its rows, the others its columns."""
    rows = indexing_axes(x, dim)
    return x.movedim(rows, tuple(range(len(rows)))).reshape(prod([x.shape[axis] for axis in rows]), -1)


def from_matrix(matrix: Tensor, like: Tensor, dim: Dim) -> Tensor:
    """The inverse of :func:`as_matrix` for a tensor of the shape of ``like``."""
    rows = indexing_axes(like, dim)
    first = tuple(range(len(rows)))
    return matrix.reshape(like.movedim(rows, first).shape).movedim(first, rows)
