"""Rules for operations that only move elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from proxmo.compaction.calls import Call
from proxmo.compaction.labels import FIXED, WILD, Facts, Labels, Operation, Values, same_everywhere
from proxmo.compaction.splits import Site, Splits


def reshaped(facts: Facts, shape: Sequence[int], operation: Operation, splits: Splits) -> Facts:
    """Return the facts of a tensor that is seen in another shape."""
    labels: list[Labels] = []
    constants: list[Values | None] = []
    grid = None
    kept: dict[int, int] = {}
    if 0 in shape:
        return Facts(tuple(same_everywhere(size, FIXED) for size in shape), (None,) * len(shape), facts.varies)
    for old, new in _matching_axes(facts.shape, shape):
        sizes = tuple(shape[axis] for axis in new)
        some_labels, some_constants, values = _regrouped(facts, old, sizes, operation, splits)
        labels += some_labels
        constants += some_constants
        wide = tuple(axis for axis in new if shape[axis] > 1)
        if len(wide) > 1 and values is not None and not np.isnan(values).all():
            grid = (wide, values.reshape([shape[axis] for axis in wide]))
        long = [axis for axis in old if facts.shape[axis] > 1]
        if len(long) == len(wide) == 1:
            kept[long[0]] = wide[0]
    if grid is None and facts.grid is not None and all(axis in kept for axis in facts.grid[0]):
        grid = (tuple(kept[axis] for axis in facts.grid[0]), facts.grid[1])
    return replace(facts.with_axes(labels, constants), grid=grid)


def _matching_axes(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of neighbouring axes that have equal numbers of elements.

    >>> _matching_axes((2, 3, 8), (6, 2, 4))
    [([0, 1], [0]), ([2], [1, 2])]
    """
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(left), j + len(right)
        while prod(old[axis] for axis in left) != prod(new[axis] for axis in right):
            if prod(old[axis] for axis in left) < prod(new[axis] for axis in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def _regrouped(
    facts: Facts, old: list[int], shape: tuple[int, ...], operation: Operation, splits: Splits
) -> tuple[list[Labels], list[Values | None], Values | None]:
    """Return labels and constants of new axes that have the elements of some old ones, and all their constants."""
    if len(old) == len(shape) == 1:
        return [facts.labels[old[0]]], [facts.constants[old[0]]], None
    # counted whatever the labels and sizes are, so that all traces have the same sites, even with a single head
    site = splits.next_site(operation.module) if len(shape) > 1 else ("", 0)
    for axis in old:
        if len(facts.labels[axis]) == 1:  # a single unit always stays
            operation.block(facts.labels[axis], f"{operation.name} drops its axis")
    long = [axis for axis in old if len(facts.labels[axis]) > 1]
    if not long:
        return [same_everywhere(1, WILD) for _ in shape], [None] * len(shape), None
    flat, values = _flattened([(facts.labels[axis], facts.constant(axis)) for axis in long], operation, splits)
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    labels: list[Labels] = [same_everywhere(1, WILD) for _ in shape]
    constants: list[Values | None] = [None] * len(shape)
    if len(wide) == 1:
        labels[wide[0]], constants[wide[0]] = flat, values
    elif wide:
        sizes = tuple(shape[axis] for axis in wide)
        parts = _split(flat.reshape(sizes), values.reshape(sizes), site, operation, splits)
        for axis, (some_labels, some_values) in zip(wide, parts, strict=True):
            labels[axis], constants[axis] = some_labels, some_values
    return labels, constants, values


def _flattened(axes: list[tuple[Labels, Values]], operation: Operation, splits: Splits) -> tuple[Labels, Values]:
    """Return labels and constants of the one axis that has the elements of several."""
    flat, values = same_everywhere(1, FIXED), np.full(1, np.nan)
    for labels, constants in axes:
        outer, inner = np.repeat(flat, len(labels)), np.tile(labels, len(flat))
        outer_values, inner_values = np.repeat(values, len(labels)), np.tile(constants, len(flat))
        if not splits.is_survey:  # new tensors are as large as needed, so what they are merged with counts
            outer, inner = (
                np.where((one >= splits.model_atoms) & (other >= 0), WILD, one)
                for one, other in ((outer, np.where(inner >= splits.model_atoms, FIXED, inner)), (inner, outer))
            )
        both = (outer >= 0) & (inner >= 0)
        if both.any() and not splits.is_survey:
            operation.block(inner[both], f"{operation.name} merges its axis with that of other units")
        # a wild axis beside a fixed one, as heads to which a mask was expanded beside the batch, joins with any units
        flat = np.where(outer >= 0, outer, np.where(inner >= 0, inner, np.minimum(outer, inner)))
        values = np.where(np.isnan(outer_values), inner_values, outer_values)
    return flat, values


def _split(
    labels: Labels, values: Values, site: Site, operation: Operation, splits: Splits
) -> list[tuple[Labels, Values | None]]:
    """Return labels and constants of each axis, given those of all elements."""
    constants = [_along(values, axis) for axis in range(values.ndim)]
    new = [same_everywhere(size, FIXED) for size in labels.shape]
    if (labels < 0).all():
        if (labels == WILD).all():
            new = [same_everywhere(size, WILD) for size in labels.shape]
        return list(zip(new, constants, strict=True))
    others = [tuple(other for other in range(labels.ndim) if other != axis) for axis in range(labels.ndim)]
    exact = [axis for axis in range(labels.ndim) if (labels.max(others[axis]) == labels.min(others[axis])).all()]
    if exact:
        chosen: int | None = exact[0]
    elif splits.is_survey:
        return list(zip(splits.survey(site, labels), constants, strict=True))
    else:
        chosen = splits.axis_for(site, labels.ndim)
    if chosen is None:
        operation.block(labels.reshape(-1), f"{operation.name} splits its channels")
        return list(zip(new, constants, strict=True))
    rows = np.moveaxis(labels, chosen, 0).reshape(labels.shape[chosen], -1)
    new[chosen] = rows.max(1)
    first = np.broadcast_to(new[chosen][:, None], rows.shape)
    operation.join(first.reshape(-1), rows.reshape(-1))
    return list(zip(new, constants, strict=True))


def _along(values: Values, axis: int) -> Values | None:
    """Return the constants along one axis, given those of all elements."""
    if np.isnan(values).all():
        return None
    rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    return np.where((rows == rows[:, :1]).all(1), rows[:, 0], np.nan)


def permuted(facts: Facts, order: Sequence[int]) -> Facts:
    moved = facts.with_axes([facts.labels[k] for k in order], [facts.constants[k] for k in order])
    if facts.grid is None:
        return moved
    return replace(moved, grid=(tuple(list(order).index(axis) for axis in facts.grid[0]), facts.grid[1]))


def indexed(facts: Facts, axis: int, index: slice | Labels) -> Facts:
    """Return the facts after some indices along an axis were taken, in order."""
    labels, constants = list(facts.labels), list(facts.constants)
    labels[axis] = labels[axis][index]
    known = constants[axis]
    constants[axis] = None if known is None else known[index]
    taken = facts.with_axes(labels, constants)
    if facts.grid is None:
        return taken
    axes, values = facts.grid
    if axis in axes:
        values = np.moveaxis(np.moveaxis(values, axes.index(axis), 0)[index], 0, axes.index(axis))
    return replace(taken, grid=(axes, values))


def dropped(facts: Facts, axis: int, index: int | None = None) -> Facts:
    """Return the facts without an axis, of which one index was taken."""
    labels = facts.labels[:axis] + facts.labels[axis + 1 :]
    constants = list(facts.constants[:axis] + facts.constants[axis + 1 :])
    if facts.grid is None:
        return facts.with_axes(labels, constants)
    axes, values = facts.grid
    if axis in axes:
        if index is None:
            return facts.with_axes(labels, constants)
        values = np.asarray(values.take(index, axes.index(axis)))
    axes = tuple(other - (other > axis) for other in axes if other != axis)
    if len(axes) == 1:
        constants[axes[0]] = values
        return facts.with_axes(labels, constants)
    return replace(facts.with_axes(labels, constants), grid=(axes, values))


def inserted(facts: Facts, axis: int, size: int = 1) -> Facts:
    labels = (*facts.labels[:axis], same_everywhere(size, WILD), *facts.labels[axis:])
    return facts.with_axes(labels, (*facts.constants[:axis], None, *facts.constants[axis:]))


def expanded(facts: Facts, shape: Sequence[int], operation: Operation) -> Facts:
    """Return the facts of a tensor broadcast to a shape."""
    while len(facts.labels) < len(shape):
        facts = inserted(facts, 0)
    labels, constants = list(facts.labels), list(facts.constants)
    for axis, size in enumerate(shape):
        if len(labels[axis]) != size:
            operation.block(labels[axis], f"{operation.name} repeats it")
            labels[axis], constants[axis] = same_everywhere(size, WILD), None
    return facts.with_axes(labels, constants)


def reshape(call: Call) -> list[Facts]:
    return [reshaped(call.facts("self"), call.results[0].shape, call.operation, call.splits)]


def permute(call: Call) -> list[Facts]:
    facts = call.facts("self")
    return [permuted(facts, [axis % len(facts.labels) for axis in call.arguments["dims"]])]


def transpose(call: Call) -> list[Facts]:
    facts = call.facts("self")
    order = list(range(len(facts.labels)))
    if order:
        first = call.arguments.get("dim0", 0)
        second = call.arguments.get("dim1", len(order) - 1)
        order[first], order[second] = order[second], order[first]
    return [permuted(facts, order)]


def expand(call: Call) -> list[Facts]:
    return [expanded(call.facts("self"), call.results[0].shape, call.operation)]


def slice_(call: Call) -> list[Facts]:
    arguments = call.arguments
    axis = arguments["dim"] % len(call.facts("self").labels)
    return [indexed(call.facts("self"), axis, slice(arguments["start"], arguments["end"], arguments["step"]))]


def select(call: Call) -> list[Facts]:
    facts = call.facts("self")
    axis = call.arguments["dim"] % len(facts.labels)
    call.operation.block(facts.labels[axis], f"{call.name} takes a channel by its position")
    return [dropped(facts, axis, call.arguments["index"])]


def unbind(call: Call) -> list[Facts]:
    facts = call.facts("self")
    axis = call.arguments["dim"] % len(facts.labels)
    call.operation.block(facts.labels[axis], f"{call.name} takes a channel by its position")
    return [dropped(facts, axis, index) for index in range(len(call.results))]


def split(call: Call) -> list[Facts]:
    facts = call.facts("self")
    axis = call.arguments["dim"] % len(facts.labels)
    parts, start = [], 0
    for result in call.results:
        parts.append(indexed(facts, axis, slice(start, start + result.shape[axis])))
        start += result.shape[axis]
    return parts


def cat(call: Call) -> list[Facts]:
    pieces = [facts for facts in call.operands() if facts.shape != (0,)]  # torch ignores these
    if not pieces:
        return call.operands()[:1]
    axis = call.arguments["dim"] % len(pieces[0].labels)
    labels, constants = list(pieces[0].labels), [pieces[0].constant(k) for k in range(len(pieces[0].labels))]
    for piece in pieces[1:]:
        for k in range(len(labels)):
            if k == axis:
                labels[k] = np.concatenate([labels[k], piece.labels[k]])
                constants[k] = np.concatenate([constants[k], piece.constant(k)])
            else:
                labels[k] = call.operation.join(labels[k], piece.labels[k])
                constants[k] = np.where(constants[k] == piece.constant(k), constants[k], np.nan)
    if (labels[axis] == WILD).any():  # pieces may differ
        labels[axis] = np.where(labels[axis] == WILD, FIXED, labels[axis]) if len(pieces) > 1 else labels[axis]
    return [Facts(tuple(labels), tuple(constants), any(piece.varies for piece in pieces))]


def stack(call: Call) -> list[Facts]:
    pieces = call.operands()
    axis = call.arguments["dim"] % (len(pieces[0].labels) + 1)
    labels = list(pieces[0].labels)
    constants = [pieces[0].constant(k) for k in range(len(labels))]
    for piece in pieces[1:]:
        labels = [call.operation.join(a, b) for a, b in zip(labels, piece.labels, strict=True)]
        constants = [np.where(c == piece.constant(k), c, np.nan) for k, c in enumerate(constants)]
    labels.insert(axis, same_everywhere(len(pieces), FIXED))
    uniform = np.array([np.nan if piece.uniform is None else piece.uniform for piece in pieces])
    constants.insert(axis, uniform)
    return [Facts(tuple(labels), tuple(constants), any(piece.varies for piece in pieces))]


def repeat(call: Call) -> list[Facts]:
    facts = call.facts("self")
    repeats = call.arguments["repeats"]
    while len(facts.labels) < len(repeats):
        facts = inserted(facts, 0)
    labels, constants = list(facts.labels), list(facts.constants)
    for axis, times in enumerate(repeats):
        single = len(labels[axis]) == 1 and labels[axis][0] < 0
        known = constants[axis]
        labels[axis] = same_everywhere(times, WILD) if single and times > 1 else np.tile(labels[axis], times)
        constants[axis] = None if known is None else np.tile(known, times)
    return [facts.with_axes(labels, constants)]


def flip(call: Call) -> list[Facts]:
    facts = call.facts("self")
    for axis in call.arguments["dims"]:
        facts = indexed(facts, axis % len(facts.labels), slice(None, None, -1))
    return [facts]


def pad(call: Call) -> list[Facts]:
    """Padding with a number: what is added has a fixed size and does not belong to any unit."""
    facts, widths, fill = call.facts("self"), call.arguments["pad"], float(call.arguments["value"])
    labels, constants = list(facts.labels), [facts.constant(k) for k in range(len(facts.labels))]
    for k, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        axis = len(labels) - 1 - k
        for width, at_start in ((before, True), (after, False)):
            for other in range(len(labels)):
                if other != axis and width > 0:
                    constants[other] = np.where(constants[other] == fill, fill, np.nan)
            labels[axis] = _padded(labels[axis], width, at_start, FIXED)
            constants[axis] = _padded(constants[axis], width, at_start, fill)
    return [Facts(tuple(labels), tuple(constants), facts.varies)]


def _padded(values: Any, width: int, at_start: bool, fill: float) -> Any:
    if width < 0:
        return values[-width:] if at_start else values[:width]
    added = np.full(width, fill, dtype=values.dtype)
    return np.concatenate([added, values] if at_start else [values, added])


def with_last_axis(call: Call) -> list[Facts]:
    """`view_as_real`: the two parts of a complex number are the last axis."""
    facts = call.facts("self")
    added = inserted(facts, len(facts.labels), 2)
    return [added.with_axes([*added.labels[:-1], same_everywhere(2, FIXED)], added.constants)]


def without_last_axis(call: Call) -> list[Facts]:
    facts = call.facts("self")
    call.operation.block(facts.labels[-1], f"{call.name} mixes its channels")
    return [dropped(facts, len(facts.labels) - 1)]


def identity(call: Call) -> list[Facts]:
    return [call.operands()[0]]


MOVEMENT_RULES = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias"), reshape),
    **dict.fromkeys(("transpose", "t", "swapaxes"), transpose),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"), split),
    **dict.fromkeys(
        ("alias", "clone", "detach", "_to_copy", "lift_fresh", "contiguous", "convert_element_type", "_conj", "lift"),
        identity,
    ),
    "permute": permute,
    "expand": expand,
    "slice": slice_,
    "select": select,
    "unbind": unbind,
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
    "flip": flip,
    "constant_pad_nd": pad,
    "view_as_real": with_last_axis,
    "view_as_complex": without_last_axis,
}
