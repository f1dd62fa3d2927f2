"""Rules for operations that choose or write elements by their index."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proxmo.compaction.calls import Call
from proxmo.compaction.labels import FIXED, Facts, Labels, Values, same_everywhere, without_units
from proxmo.compaction.movement_rules import indexed


def index_select(call: Call) -> list[Facts]:
    x = call.facts("self")
    axis = call.arguments["dim"] % len(x.labels)
    return [_chosen(call, x, axis, call.arguments["index"])]


def _chosen(call: Call, x: Facts, axis: int, index: Tensor) -> Facts:
    """Return the facts after indices along an axis were chosen by a vector."""
    if call.facts_of(index).varies:
        call.operation.block(x.labels[axis], f"{call.name} chooses channels by the inputs")
        labels = list(x.labels)
        labels[axis] = same_everywhere(len(index), FIXED)
        constants = list(x.constants)
        constants[axis] = None
        return Facts(tuple(labels), tuple(constants), True, x.uniform)
    chosen = indexed(x, axis, index.detach().cpu().numpy().astype(np.int64))
    call.operation.block(x.labels[axis], f"{call.name} chooses channels by their position")
    return chosen


def index(call: Call) -> list[Facts]:
    """Advanced indexing, ``x[i, :, j]``, with tensors of integers or masks."""
    x, result = call.facts("self"), call.results[0]
    given = list(call.arguments["indices"])
    labels: list[Labels] = []
    constants: list[Values | None] = []
    places: list[int] = []
    axis = 0
    for tensor in [*given, *([None] * len(x.labels))]:
        if axis >= len(x.labels):
            break
        if tensor is None:
            labels.append(x.labels[axis])
            constants.append(x.constants[axis])
            axis += 1
            continue
        taken = tensor.dim() if tensor.dtype in (torch.bool, torch.uint8) else 1
        for chosen in x.labels[axis : axis + taken]:
            call.operation.block(chosen, f"{call.name} chooses channels by their position")
        axis += taken
        places.append(len(labels))
    added = result.dim() - len(labels)
    # the new axes are where the first index was, or in front if others are between
    place = places[0] if places and len(set(places)) == 1 else 0
    new = [same_everywhere(size, FIXED) for size in result.shape[place : place + added]]
    labels[place:place] = new
    constants[place:place] = [None] * added
    varies = any(facts.varies for facts in call.operands())
    return [Facts(tuple(labels), tuple(constants), varies, x.uniform)]


def gather(call: Call) -> list[Facts]:
    x, chosen = call.facts("self"), call.facts("index")
    axis = call.arguments["dim"] % max(len(x.labels), 1)
    labels = []
    for k, own in enumerate(x.labels):
        if k == axis or len(own) != len(chosen.labels[k]):
            call.operation.block(own, f"{call.name} chooses channels by their position")
            labels.append(chosen.labels[k])
        else:
            labels.append(call.operation.join(own, chosen.labels[k]))
    constants = [None if k == axis else x.constants[k] for k in range(len(labels))]
    return [Facts(tuple(labels), tuple(constants), True, x.uniform)]


def write_along_axis(call: Call) -> list[Facts]:
    """`index_add`, `index_copy` and the like: a source is written to chosen indices of one axis."""
    x = call.facts("self")
    source = call.optional_facts("source") or call.optional_facts("src")
    axis = call.arguments["dim"] % max(len(x.labels), 1)
    call.operation.block(x.labels[axis], f"{call.name} writes to channels by their position")
    labels, constants = list(x.labels), [x.constant(k) for k in range(len(x.labels))]
    if source is not None:
        call.operation.block(source.labels[axis], f"{call.name} writes to channels by their position")
    for k in range(len(labels)):
        if k == axis or source is None or len(source.labels[k]) != len(labels[k]):
            constants[k] = np.full(len(labels[k]), np.nan)
        else:
            labels[k] = call.operation.join(labels[k], source.labels[k])
            known = source.constant(k)
            adds_nothing = (known == constants[k]) & ((known == 0) | (call.name == "index_copy"))
            constants[k] = np.where(adds_nothing, known, np.nan)
    return [Facts(tuple(labels), tuple(constants), True)]


def index_put(call: Call) -> list[Facts]:
    """``x[i] = values``: the axes behind the indices belong to the same units."""
    x, values = call.facts("self"), call.facts("values")
    given = list(call.arguments["indices"])
    if any(tensor is None for tensor in given):
        for labels_of_axis in (*x.labels, *values.labels):
            call.operation.block(labels_of_axis, f"{call.name} writes to channels by their position")
        return [without_units(x.shape, varies=True)]
    axis = 0
    for tensor in given:
        taken = tensor.dim() if tensor.dtype in (torch.bool, torch.uint8) else 1
        for written in x.labels[axis : axis + taken]:
            call.operation.block(written, f"{call.name} writes to channels by their position")
        axis += taken
    labels = list(x.labels)
    constants: list[Values | None] = [None] * len(labels)
    for k in range(1, min(len(labels) - axis, len(values.labels)) + 1):
        if len(values.labels[-k]) == len(labels[-k]):
            labels[-k] = call.operation.join(labels[-k], values.labels[-k])
            known = values.constant(len(values.labels) - k)
            constants[-k] = np.where((x.constant(len(labels) - k) == known) & (known == 0), 0.0, np.nan)
    for some in values.labels[: max(len(values.labels) - (len(labels) - axis), 0)]:
        call.operation.block(some, f"{call.name} writes to channels by their position")
    return [Facts(tuple(labels), tuple(constants), True)]


INDEX_RULES = {
    "index_select": index_select,
    "index": index,
    "gather": gather,
    **dict.fromkeys(
        ("index_add", "index_copy", "index_reduce", "scatter", "scatter_add", "index_fill"), write_along_axis
    ),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), index_put),
}
