"""Units: groups of a penalty that span several tensors, such as a neuron with its bias and its normalisation.

The option `units` of a parameter group holds them as plain data that checkpoints keep: a sequence of families. Units of
a family have the same size, so that they are the rows of one matrix, and a penalty with `dim=0` on that matrix takes
each unit as one group. Sharded parameters are gathered, unless each rank holds whole units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from proxmo import shards


class Slice(NamedTuple):
    """The part of a parameter that belongs to the units of a family."""

    position: int
    """The position of the parameter in the group."""
    axis: int
    """The axis that runs over units."""
    indices: tuple[tuple[int, ...], ...] | None
    """For each unit its indices along the axis; ``None`` if index i is unit i, for the whole axis."""


Family: TypeAlias = tuple[Slice, ...]
Units: TypeAlias = tuple[Family, ...]


def as_units(data: Any, params: Sequence[Tensor]) -> Units | None:
    """Return units from plain data, whose tuples may have become lists in a file; raise if they do not fit."""
    if data is None or (isinstance(data, (tuple, list)) and not data):
        return None
    try:
        units = tuple(tuple(Slice(int(p), int(axis), _as_rows(rows)) for p, axis, rows in family) for family in data)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"units must be families of (position, axis, indices), as from unit_groups, got {data!r}"
        ) from error
    taken: dict[int, list[tuple[int, set[int]]]] = {}
    for family in units:
        heights = {_check_slice(part, params, taken) for part in family}
        if len(heights) != 1:
            raise ValueError(
                f"a family must have the same number of units in each of its parameters, got {sorted(heights)}"
            )
    return units


def _as_rows(rows: Any) -> tuple[tuple[int, ...], ...] | None:
    return None if rows is None else tuple(tuple(map(int, row)) for row in rows)


def _check_slice(part: Slice, params: Sequence[Tensor], taken: dict[int, list[tuple[int, set[int]]]]) -> int:
    """Return the number of units; raise if the slice does not fit its parameter or overlaps with another."""
    position, axis, indices = part
    if not (0 <= position < len(params) and 0 <= axis < params[position].dim()):
        raise ValueError(f"units name axis {axis} of parameter {position}, which the group does not have")
    size = params[position].shape[axis]
    rows = tuple((index,) for index in range(size)) if indices is None else indices
    every = [index for row in rows for index in row]
    if not all(0 <= index < size for index in every):
        raise ValueError(f"units name indices beyond the size {size} of axis {axis} of parameter {position}")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"units must have the same number of indices each in parameter {position}, got {indices}")
    mine = set(every)
    others = taken.setdefault(position, [])
    # slices along different axes always overlap
    overlaps = any(indices & mine if other == axis else indices and mine for other, indices in others)
    if len(mine) < len(every) or overlaps:
        raise ValueError(f"units must not have weights in common, got some of parameter {position} twice")
    others.append((axis, mine))
    return len(rows)


def units_in(family: Family, params: Sequence[Tensor]) -> int:
    """Return the number of units of a family."""
    position, axis, indices = family[0]
    return params[position].shape[axis] if indices is None else len(indices)


def units_of(group: Mapping[str, Any], params: Sequence[Tensor]) -> Units | None:
    """Return the units of a parameter group as they are among ``params``, some or all of its parameters, in order.

    What a unit has in other parameters is left out; a family without any of ``params`` is dropped.
    """
    units: Units | None = group["units"]
    if units is None or len(params) == len(group["params"]):
        return units
    present = {id(p) for p in params}
    positions = {k: i for i, k in enumerate(k for k, p in enumerate(group["params"]) if id(p) in present)}
    kept = (tuple(s._replace(position=positions[s.position]) for s in f if s.position in positions) for f in units)
    return tuple(family for family in kept if family)


def seen_by_penalty(units: Units | None, tensors: Sequence[Tensor]) -> Iterable[Tensor]:
    """Return the tensors that a penalty applies to: each alone, or for each family a new matrix with units as rows.

    >>> weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])
    >>> list(seen_by_penalty(((Slice(0, 0, None), Slice(1, 0, None)),), [weight, bias]))
    [tensor([[1., 2., 5.],
            [3., 4., 6.]])]
    """
    return tensors if units is None else (joined(family, tensors) for family in units)


def joined(family: Family, tensors: Sequence[Tensor]) -> Tensor:
    """Return the units of a family as the rows of a new matrix."""
    used = [tensors[part.position] for part in family]
    if shards.sharded_alike(used, [part.axis for part in family]) and all(part.indices is None for part in family):
        rows = torch.cat([_rows(shards.local(t), part) for t, part in zip(used, family, strict=True)], 1)
        return shards.rows_sharded_like(rows, used[0], family[0].axis)
    return torch.cat([_rows(shards.full(t), part) for t, part in zip(used, family, strict=True)], 1)


def steps_of_units(units: Units, steps: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return for each family the steps of its matrix, which `joined` makes of ``tensors``.

    One for each unit, where all its parts have the same, as a metric that is constant on units has it; then the prox
    keeps its closed form.
    """
    found = []
    for family in units:
        along_units = [tensors[part.position].shape[part.axis] == steps[part.position].numel() for part in family]
        per_unit = joined(family, steps) if all(along_units) and not torch.compiler.is_compiling() else None
        if per_unit is not None and not shards.is_sharded(per_unit) and bool((per_unit == per_unit[:, :1]).all()):
            found.append(per_unit[:, :1])
        else:
            whole = [step.expand(tensor.shape) for step, tensor in zip(steps, tensors, strict=True)]
            found.append(joined(family, whole))
    return found


def write_back(family: Family, matrix: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the rows of the matrix of a family back to where `joined` took them from."""
    widths = [_width(tensors[part.position], part) for part in family]
    for part, rows in zip(family, torch.split(shards.local(matrix), widths, 1), strict=True):
        tensor = tensors[part.position]
        gathered = shards.is_sharded(tensor) and not shards.is_sharded(matrix)
        if not gathered:
            target = shards.local(tensor)
        elif part.indices is None:  # all of it is overwritten
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        else:
            target = shards.full(tensor)
        along_units = target.movedim(part.axis, 0)
        if part.indices is None:
            along_units.copy_(rows.reshape(along_units.shape))
        else:
            index = _index(part, rows)
            values = rows.reshape(len(index), *along_units.shape[1:])
            along_units.index_copy_(0, index, values.to(along_units.dtype))
        if gathered:
            shards.local(tensor).copy_(shards.shard_of(target, tensor))
    shards.mark_written([tensors[part.position] for part in family])


def _rows(tensor: Tensor, part: Slice) -> Tensor:
    along_units = tensor.movedim(part.axis, 0)
    if part.indices is None:
        return along_units.reshape(len(along_units), _width(tensor, part))
    return along_units.index_select(0, _index(part, tensor)).reshape(len(part.indices), _width(tensor, part))


def _width(tensor: Tensor, part: Slice) -> int:
    """Return the number of elements that each unit has in the tensor."""
    across = prod([size for axis, size in enumerate(tensor.shape) if axis != part.axis])
    return across * (1 if part.indices is None else len(part.indices[0]))


def _index(part: Slice, like: Tensor) -> Tensor:
    return torch.tensor(part.indices, device=like.device).flatten()
