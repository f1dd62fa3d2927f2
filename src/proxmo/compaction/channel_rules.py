"""Rules for normalisation, reductions, pooling, and operations along an axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proxmo.compaction.calls import Call
from proxmo.compaction.labels import FIXED, WILD, Facts, Labels, Values, same_everywhere

_KEEP_CONSTANTS = frozenset({"mean", "amax", "amin", "max", "min"})
"""Reductions that return the constant, however many elements it is reduced over."""
_ADD_UP = frozenset({"sum", "linalg_vector_norm"})
"""Reductions to which zeros add nothing."""


def batch_norm(call: Call) -> list[Facts]:
    x = call.facts("input")
    axis = 1
    statistics = [call.optional_facts(name) for name in ("running_mean", "running_var")]
    scale, shift = call.optional_facts("weight"), call.optional_facts("bias")
    labels = x.labels[axis]
    for facts in (scale, shift, *statistics):
        if facts is not None:
            labels = call.operation.join(labels, facts.labels[0])
    batch_statistics = bool(call.arguments.get("training")) or statistics[0] is None
    constants = _normalised(call, x.constant(axis), scale, shift, batch_statistics)
    others = [None] * (len(x.labels) - 2)
    result = Facts((x.labels[0], labels, *x.labels[2:]), (None, constants, *others), x.varies)
    return _with_statistics(call, result)


def _normalised(call: Call, x: Values, scale: Facts | None, shift: Facts | None, batch_statistics: bool) -> Values:
    """Return the constants behind a normalisation of every channel by itself."""
    size = len(x)
    weight = np.ones(size) if scale is None else scale.constant(0)
    bias = np.zeros(size) if shift is None else shift.constant(0)
    if batch_statistics:
        centred = np.where(np.isnan(x), np.nan, 0.0)
    else:
        mean = call.arguments["running_mean"].double().cpu().numpy()
        variance = call.arguments["running_var"].double().cpu().numpy()
        centred = (x - mean) / np.sqrt(variance + call.arguments["eps"])
    return np.where(weight == 0, 0.0, centred * weight) + bias


def group_norm(call: Call) -> list[Facts]:
    """Groups of channels are normalised together, so a group goes or stays as a whole."""
    x, groups = call.facts("input"), call.arguments["group"]
    scale, shift = call.optional_facts("weight"), call.optional_facts("bias")
    labels = x.labels[1]
    for facts in (scale, shift):
        if facts is not None:
            labels = call.operation.join(labels, facts.labels[0])
    by_group = labels.reshape(groups, -1)
    if groups == 1:
        call.operation.mix(labels)
    for group in by_group:
        call.operation.join_all(group)
    values = x.constant(1).reshape(groups, -1)
    same = np.broadcast_to((values == values[:, :1]).all(1, keepdims=True), values.shape).reshape(-1)
    constants = _normalised(call, np.where(same, 0.0, np.nan), scale, shift, True)
    others = [None] * (len(x.labels) - 2)
    return _with_statistics(call, Facts((x.labels[0], labels, *x.labels[2:]), (None, constants, *others), x.varies))


def layer_norm(call: Call) -> list[Facts]:
    x = call.facts("input")
    first = len(x.labels) - len(call.arguments["normalized_shape"])
    affine = [facts for name in ("weight", "bias") if (facts := call.optional_facts(name)) is not None]
    labels = list(x.labels)
    for axis in range(first, len(labels)):
        for facts in affine:
            labels[axis] = call.operation.join(labels[axis], facts.labels[axis - first])
        call.operation.mix(labels[axis])
    shift = call.optional_facts("bias")
    shifts = shift is not None and not all((shift.constant(k) == 0).all() for k in range(len(shift.labels)))
    constants = [
        np.where((x.constant(axis) == 0) & (not shifts), 0.0, np.nan) if axis < first else None
        for axis in range(len(labels))
    ]
    return _with_statistics(call, Facts(tuple(labels), tuple(constants), x.varies))


def _with_statistics(call: Call, result: Facts) -> list[Facts]:
    """Add facts of the means and deviations that normalisations return beside their result."""
    return [result, *(_fixed(tensor.shape) for tensor in call.results[1:])]


def _fixed(shape: Sequence[int]) -> Facts:
    return Facts(tuple(same_everywhere(size, FIXED) for size in shape), (None,) * len(shape), True)


def reduction(call: Call) -> list[Facts]:
    x = call.operands()[0]
    axes = _reduced_axes(call, len(x.labels))
    takes_mean_square = call.name == "mean" and x.squared and len(axes) == 1
    for axis in axes:
        if call.name in _ADD_UP or takes_mean_square:
            labels = x.labels[axis]
            if takes_mean_square and (labels >= 0).any():
                call.operation.norms.append((labels, call.results[0].dtype))
            alive = (labels >= 0) & (x.constant(axis) != 0)
            if alive.any():
                call.operation.reads.append((labels[alive], f"{call.name} reads a varying value"))
        else:
            call.operation.mix(x.labels[axis])
    results = []
    for tensor in call.results:
        keeps_axes = tensor.dim() == len(x.labels)
        kept: list[Labels] = []
        constants: list[Values | None] = []
        for axis in range(len(x.labels)):
            if axis not in axes:
                kept.append(x.labels[axis])
                constants.append(_reduced_constants(call, x.constant(axis)))
            elif keeps_axes:
                kept.append(same_everywhere(1, WILD))
                constants.append(None)
        results.append(Facts(tuple(kept), tuple(constants), x.varies))
    return results


def _reduced_axes(call: Call, number: int) -> list[int]:
    dims = call.arguments.get("dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(number))
    return sorted(axis % max(number, 1) for axis in (dims if isinstance(dims, (list, tuple)) else [dims]))


def _reduced_constants(call: Call, values: Values) -> Values:
    if call.name in _KEEP_CONSTANTS:
        return values
    return np.where(values == 0, 0.0, np.nan) if call.name in _ADD_UP else np.full(len(values), np.nan)


def along_axis(call: Call) -> list[Facts]:
    """Softmax, sorting, cumulative sums and others that compare or add up the indices of one axis."""
    x = call.operands()[0]
    dim = call.arguments.get("dim", -1)
    axis = dim % max(len(x.labels), 1)
    results = []
    if len(x.labels):
        call.operation.mix(x.labels[axis])
    for tensor in call.results:
        labels = [x.labels[k] if k != axis else same_everywhere(tensor.shape[k], FIXED) for k in range(tensor.dim())]
        results.append(Facts(tuple(labels), (None,) * len(labels), x.varies))
    return results


def pooling(call: Call) -> list[Facts]:
    """Pooling and upsampling act on each channel, over the last one to three axes."""
    x = call.operands()[0]
    spatial = next(n for n in (1, 2, 3) if f"{n}d" in call.name)
    lead = len(x.labels) - spatial
    for labels in x.labels[lead:]:
        call.operation.mix(labels)
    pads = call.name.startswith("avg_pool") and any(call.arguments.get("padding") or [0])
    changes_border = pads or "bicubic" in call.name  # a constant may change at the border
    results = []
    for tensor in call.results:
        known = [x.constant(axis) for axis in range(lead)]
        constants = [np.where(v == 0, 0.0, np.nan) if changes_border else v for v in known]
        ends = [same_everywhere(size, FIXED) for size in tensor.shape[lead:]]
        results.append(Facts((*x.labels[:lead], *ends), (*constants, *(None for _ in ends)), x.varies))
    return results


def embedding(call: Call) -> list[Facts]:
    weight, indices = call.facts("weight"), call.facts("indices")
    call.operation.block(weight.labels[0], f"{call.name} chooses rows by their number")
    call.operation.weights.append(weight.labels[0])
    constants: list[Values | None] = [None] * len(indices.labels)
    known = weight.constant(1)
    return [Facts((*indices.labels, weight.labels[1]), (*constants, known), True)]


def embedding_bag(call: Call) -> list[Facts]:
    weight, result = call.facts("weight"), call.results[0]
    call.operation.block(weight.labels[0], f"{call.name} chooses rows by their number")
    call.operation.weights.append(weight.labels[0])
    zero = np.where(weight.constant(1) == 0, 0.0, np.nan)
    bags = Facts((same_everywhere(len(result), FIXED), weight.labels[1]), (None, zero), True)
    return [bags, *(_fixed(tensor.shape) for tensor in call.results[1:])]


CHANNEL_RULES = {
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_no_training",
            "cudnn_batch_norm",
            "batch_norm_with_update",
            "_batch_norm_no_update",
        ),
        batch_norm,
    ),
    "native_group_norm": group_norm,
    "native_layer_norm": layer_norm,
    **dict.fromkeys(
        (
            *("sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "std_mean", "any", "all"),
            *("logsumexp", "argmax", "argmin", "linalg_vector_norm", "norm"),
        ),
        reduction,
    ),
    **dict.fromkeys(
        (
            *(
                "_softmax",
                "_log_softmax",
                "_safe_softmax",
                "softmax",
                "log_softmax",
                "cumsum",
                "cumprod",
                "logcumsumexp",
            ),
            *("sort", "topk", "argsort", "cummax", "cummin", "kthvalue"),
        ),
        along_axis,
    ),
    "embedding": embedding,
    "_embedding_bag_forward_only": embedding_bag,
    "_embedding_bag": embedding_bag,
}
