"""Rules for operations that sum products: matrix products, convolutions, attention, and sums themselves.

A sum over units reads them: a unit that is zero adds nothing, so it can be removed. So can one that a weight of zero
multiplies, or a constant that moves to the bias of the layer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from proxmo.compaction.calls import Call
from proxmo.compaction.labels import FIXED, Facts, Labels, Values, atoms_in, same_everywhere, without_units
from proxmo.compaction.movement_rules import permuted
from proxmo.compaction.pointwise_rules import added

_FEW = 8


def mm(call: Call) -> list[Facts]:
    return [_matrix_product(call, "self", "mat2")]


def addmm(call: Call) -> list[Facts]:
    product = _matrix_product(call, "mat1", "mat2")
    return [added([product, call.facts("self")], product.shape, call.operation)]


def mv(call: Call) -> list[Facts]:
    left, right = call.facts("self"), call.facts("vec")
    _read(call, left, 1, right, 0, None)
    return [Facts((left.labels[0],), (_zeros(left.constant(0)),), left.varies or right.varies)]


def dot(call: Call) -> list[Facts]:
    left, right = call.facts("self"), call.facts("tensor")
    _read(call, left, 0, right, 0, None)
    return [Facts((), (), left.varies or right.varies)]


def bmm(call: Call) -> list[Facts]:
    return [_batched_product(call, call.facts("self"), call.facts("mat2"))]


def baddbmm(call: Call) -> list[Facts]:
    product = _batched_product(call, call.facts("batch1"), call.facts("batch2"))
    return [added([product, call.facts("self")], product.shape, call.operation)]


def _matrix_product(call: Call, first: str, second: str) -> Facts:
    left, right = call.facts(first), call.facts(second)
    read_by_right = left.varies or not right.varies
    if read_by_right:
        _read(call, left, 1, right, 0, call.arguments[second])
    else:
        _read(call, right, 0, left, 1, None)
    rows, columns = _zeros(left.constant(0)), _zeros(right.constant(1))
    if not right.varies:
        columns = _linear_constants(call.arguments[second].detach().T, columns, left.constant(1))
    elif not left.varies:
        rows = _linear_constants(call.arguments[first].detach(), rows, right.constant(0))
    return Facts((left.labels[0], right.labels[1]), (rows, columns), left.varies or right.varies)


def _batched_product(call: Call, left: Facts, right: Facts) -> Facts:
    if left.varies or not right.varies:
        _read(call, left, 2, right, 1, None)
    else:
        _read(call, right, 1, left, 2, None)
    batch = call.operation.join(left.labels[0], right.labels[0])
    zero = np.where((left.constant(0) == 0) | (right.constant(0) == 0), 0.0, np.nan)
    constants = (zero, _zeros(left.constant(1)), _zeros(right.constant(2)))
    return Facts((batch, left.labels[1], right.labels[2]), constants, left.varies or right.varies)


def _zeros(values: Values) -> Values:
    """Return which constants are zero: sums of others depend on the number of terms."""
    return np.where(values == 0, 0.0, np.nan)


def _linear_constants(weight: Tensor, zero_rows: Values, inputs: Values) -> Values:
    """Return the constants that a matrix with outputs as rows makes of those of its inputs.

    Args:
        weight: the matrix.
        zero_rows: its rows that are known to be zero.
        inputs: the constants of the inputs.
    """
    unknown = np.isnan(inputs)
    if unknown.all():
        return _zeros(zero_rows)
    columns = torch.from_numpy(np.flatnonzero(unknown)).to(weight.device)
    reached = (weight[:, columns[:_FEW]] != 0).any(1)  # decides for nearly all rows of a dense matrix
    rest = (~reached).nonzero().flatten()
    if len(rest) and len(columns) > _FEW:
        reached[rest] = (weight[rest][:, columns] != 0).any(1)
    result = np.where(reached.cpu().numpy(), np.nan, 0.0)
    constant = torch.from_numpy(np.flatnonzero(~unknown & (inputs != 0))).to(weight.device)
    rows = (~reached).nonzero().flatten()
    if len(constant) and len(rows):
        values = torch.from_numpy(inputs).to(weight.device)[constant]
        result[rows.cpu().numpy()] = (weight[rows][:, constant].double() @ values).cpu().numpy()
    return result


def _read(call: Call, data: Facts, axis: int, weight: Facts, weight_axis: int, tensor: Tensor | None) -> None:
    """Record that a sum over products of data and weight reads the units along an axis of both."""
    record_read(
        call,
        (data.labels[axis], data.constant(axis)),
        (weight.labels[weight_axis], weight.constant(weight_axis)),
        made=not data.varies,
        foldable=tensor is not None and isinstance(call.module, nn.Linear),
    )


def record_read(
    call: Call,
    data: tuple[Labels, Values],
    weight: tuple[Labels, Values],
    *,
    made: bool,
    foldable: bool,
    border: bool = False,
) -> None:
    """Record that a layer reads units.

    Args:
        call: the operation.
        data: labels and constants of what is read.
        weight: labels and constants of what multiplies it.
        made: whether the data are parameters themselves.
        foldable: whether a constant can move to the bias of the layer.
        border: whether the layer pads its inputs with zeros.
    """
    operation = call.operation
    labels = operation.join(*(side[0] for side in (data, weight)))
    operation.weights.append(atoms_in(weight[0]))
    if made:
        operation.made.append(atoms_in(data[0]))
    alive = (labels >= 0) & ~((data[1] == 0) | (weight[1] == 0))
    if not alive.any():
        return
    constant = alive & ~np.isnan(data[1])
    if foldable and not border and _can_fold(call.module):
        indices = np.flatnonzero(constant)
        if len(indices):
            operation.folds.append((operation.module, labels[indices], indices, data[1][indices]))
        alive &= ~constant
    elif border and foldable and constant.any():
        operation.reads.append((labels[constant], f"{operation.module!r} pads the constant with zeros"))
        alive &= ~constant
    if alive.any():
        operation.reads.append((labels[alive], f"{operation.module!r} reads a varying value"))


def _can_fold(module: nn.Module | None) -> bool:
    """Return whether the module is a layer to whose bias a constant can be added."""
    if not isinstance(module, (nn.Linear, _ConvNd)):
        return False
    standard = any(type(module).forward is layer.forward for layer in _FOLDABLE)
    return standard and isinstance(module._parameters.get("weight"), nn.Parameter)


_FOLDABLE: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def convolution(call: Call) -> list[Facts]:
    x, weight, groups = call.facts("input"), call.facts("weight"), call.arguments["groups"]
    tensor: Tensor = call.arguments["weight"].detach()
    if call.arguments["transposed"]:
        order = [1, 0, *range(2, len(weight.labels))]
        if groups == 1:
            weight, tensor = permuted(weight, order), tensor.permute(order)
    for labels in (*x.labels[2:], *weight.labels[2:]):
        call.operation.block(labels, f"{call.name} mixes its positions")
    call.operation.weights += weight.labels[2:]
    border = _has_border_effects(call)
    spatial = [same_everywhere(size, FIXED) for size in call.results[0].shape[2:]]
    inputs = x.constant(1)
    if border:
        inputs = _zeros(inputs)
    if groups == 1:
        data, kernel = (x.labels[1], x.constant(1)), (weight.labels[1], weight.constant(1))
        record_read(call, data, kernel, made=False, foldable=True, border=border)
        outputs, made = weight.labels[0], _convolved_constants(tensor, inputs)
    else:
        outputs, made = _grouped(call, x, weight, tensor, inputs)
    result = Facts((x.labels[0], outputs, *spatial), (None, made, *(None for _ in spatial)), True)
    bias = call.optional_facts("bias")
    if bias is None:
        return [result]
    ones = [same_everywhere(1, FIXED)] * len(spatial)
    shift = Facts((*bias.labels, *ones), (bias.constant(0), *(None for _ in spatial)), False)
    return [added([result, shift], result.shape, call.operation)]


def _convolved_constants(weight: Tensor, inputs: Values) -> Values:
    """Return the constants that a convolution makes of those of its inputs."""
    sums = weight.flatten(2).double().sum(2)
    nonzero = (weight != 0).flatten(2).any(2)
    return _linear_constants(
        torch.where(nonzero & (sums == 0), torch.nan, sums),  # a kernel that adds up to zero still reads
        np.where(nonzero.any(1).cpu().numpy(), np.nan, 0.0),
        inputs,
    )


def _grouped(call: Call, x: Facts, weight: Facts, tensor: Tensor, inputs: Values) -> tuple[Labels, Values]:
    """Return labels and constants of the outputs of a convolution in groups, which go or stay as a whole."""
    groups, transposed = call.arguments["groups"], call.arguments["transposed"]
    operation = call.operation
    into = x.labels[1].reshape(groups, -1)
    operation.block(weight.labels[1], f"{call.name} has groups")
    operation.weights.append(weight.labels[1])
    if transposed:  # the weight has inputs as rows
        per_group = tensor.shape[1]
        first = np.repeat(into[:, 0], per_group)
        rows = weight.labels[0].reshape(groups, -1)
        by_group = tensor.reshape(groups, -1, *tensor.shape[1:]).transpose(1, 2).flatten(0, 1)
    else:
        rows = weight.labels[0].reshape(groups, -1)
        first = weight.labels[0]
        by_group = tensor
    for group in range(groups) if into.shape[1] > 1 or rows.shape[1] > 1 else ():
        operation.join_all(np.concatenate([into[group], rows[group]]))
    if into.shape[1] == rows.shape[1] == 1:
        operation.join(into[:, 0], rows[:, 0])
    outside = (into == FIXED).any(1)
    if outside.any():
        operation.block(rows[outside].reshape(-1), f"{call.name} reads the inputs of the model")
    constants = np.concatenate(
        [
            _convolved_constants(part, inputs[group * into.shape[1] : (group + 1) * into.shape[1]])
            for group, part in enumerate(by_group.chunk(groups))
        ]
    )
    return first, constants


def _has_border_effects(call: Call) -> bool:
    """Return whether a constant input may give different outputs at the border and inside."""
    return bool(call.arguments["transposed"]) or any(call.arguments["padding"])


def attention(call: Call) -> list[Facts]:
    """Attention on (batch, heads, time, dimensions), with groups of queries if there are fewer heads of keys."""
    q, k, v = (call.facts(name) for name in ("query", "key", "value"))
    operation = call.operation
    groups = len(q.labels[1]) // len(k.labels[1])
    heads = operation.join(q.labels[1], np.repeat(k.labels[1], groups))
    heads = operation.join(heads, np.repeat(v.labels[1], len(q.labels[1]) // len(v.labels[1])))
    for facts in (k, v):
        operation.mix(facts.labels[2])
    for facts in (q, k):
        operation.block(facts.labels[3], f"{call.name} scales by its number of dimensions")
    batch = operation.join(operation.join(q.labels[0], k.labels[0]), v.labels[0])
    mask = call.optional_facts("attn_mask") or call.optional_facts("attn_bias")
    if mask is not None:
        heads = _join_mask(call, mask, heads)
    zero = _zeros(np.repeat(v.constant(1), len(heads) // len(v.labels[1])))
    labels = (batch, heads, q.labels[2], v.labels[3])
    outputs = Facts(labels, (None, zero, None, _zeros(v.constant(3))), True)
    rest = [replace(outputs, labels=_fixed_like(t), constants=(None,) * t.dim()) for t in call.results[1:]]
    return [outputs, *rest]


def _join_mask(call: Call, mask: Facts, heads: Labels) -> Labels:
    for axis, labels in enumerate(mask.labels[::-1]):
        if axis == 2 and len(labels) == len(heads):
            heads = call.operation.join(heads, labels)
        elif axis != 2:
            call.operation.mix(labels)
    return heads


def _fixed_like(tensor: Tensor) -> tuple[Labels, ...]:
    return tuple(same_everywhere(size, FIXED) for size in tensor.shape)


def grouped_mm(call: Call) -> list[Facts]:
    """Rows of a matrix by groups, each times a matrix of its own, as tokens by experts."""
    x, weight = call.facts("self"), call.facts("mat2")
    if len(x.labels) != 2 or len(weight.labels) != 3:
        for labels in (*x.labels, *weight.labels):
            call.operation.mix(labels)
        return [without_units(call.results[0].shape, varies=True)]
    call.operation.block(weight.labels[0], f"{call.name} chooses matrices by their number")
    call.operation.weights.append(weight.labels[0])
    _read(call, x, 1, weight, 1, None)
    constants = (_zeros(x.constant(0)), _zeros(weight.constant(2)))
    product = Facts((x.labels[0], weight.labels[2]), constants, True)
    bias = call.optional_facts("bias")
    return [product if bias is None else added([product, bias], product.shape, call.operation)]


CONTRACTION_RULES = {
    "_grouped_mm": grouped_mm,
    "mm": mm,
    "addmm": addmm,
    "mv": mv,
    "dot": dot,
    "bmm": bmm,
    "baddbmm": baddbmm,
    **dict.fromkeys(("convolution", "convolution_overrideable", "_convolution"), convolution),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        attention,
    ),
}
