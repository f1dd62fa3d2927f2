"""Rules for operations that treat every element alike, which torch tags as pointwise, and for constants under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxmo.compaction.calls import Call
from proxmo.compaction.labels import WILD, Facts, Labels, Operation, Values, same_everywhere
from proxmo.compaction.movement_rules import expanded

_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "pow"})
_PRODUCTS = frozenset({"mul", "div"})

Evaluate = Callable[[list[Values]], Values]
"""Applies an operation to constants, given as arrays of the same size, one for each operand."""


def pointwise(call: Call) -> list[Facts]:
    shape = tuple(call.results[0].shape)
    facts = combined(call.operands(), shape, call.operation, _evaluation(call))
    return [replace(facts, squared=_is_square(call))]


def _is_square(call: Call) -> bool:
    if call.name == "mul":
        return call.arguments["self"] is call.arguments["other"]
    return call.name == "square" or (call.name == "pow" and call.arguments.get("exponent") == 2)


def combined(operands: Sequence[Facts], shape: tuple[int, ...], operation: Operation, evaluate: Evaluate) -> Facts:
    """Return the facts of the result of an operation on operands that are broadcast to its shape."""
    labels = [_joined_axis(operands, axis - len(shape), size, operation) for axis, size in enumerate(shape)]
    varies = any(facts.varies for facts in operands)
    if all(facts.uniform is not None for facts in operands):
        (value,) = evaluate([np.array([facts.uniform], dtype=float) for facts in operands])
        uniform = None if np.isnan(value) else float(value)
        return Facts(tuple(labels), (None,) * len(shape), varies, uniform)
    constants = [_evaluated_axis(operands, axis - len(shape), size, evaluate) for axis, size in enumerate(shape)]
    return Facts(tuple(labels), tuple(constants), varies)


def _joined_axis(operands: Sequence[Facts], axis: int, size: int, operation: Operation) -> Labels:
    """Return the labels along an axis, counted from the end."""
    labels = same_everywhere(size, WILD)
    for facts in operands:
        if len(facts.labels) >= -axis:
            if len(facts.labels[axis]) == size:
                labels = operation.join(facts.labels[axis], labels)
            else:
                operation.block(facts.labels[axis], f"{operation.name} repeats it")
    return labels


def _evaluated_axis(operands: Sequence[Facts], axis: int, size: int, evaluate: Evaluate) -> Values | None:
    values = []
    for facts in operands:
        spans = len(facts.labels) >= -axis and len(facts.labels[axis]) == size
        if spans and facts.uniform is None:
            known = facts.constants[axis]
            values.append(np.full(size, np.nan) if known is None else known)
        else:
            values.append(np.full(size, np.nan if facts.uniform is None else facts.uniform))
    if all(np.isnan(v).all() for v in values):
        return None
    return evaluate(values)


def _evaluation(call: Call) -> Evaluate:
    """Return how a pointwise operator acts on constants."""

    def evaluate(values: list[Values]) -> Values:
        unknown = np.logical_or.reduce([np.isnan(v) for v in values])
        result = np.where(unknown, np.nan, _apply(call, values))
        if call.name in _ARITHMETIC and _has_number(call):
            result[result != 0] = np.nan  # the number may come from the inputs or their size
        if call.name in _PRODUCTS:  # zero times anything is zero, as long as that is finite
            for v in values[:1] if call.name == "div" else values:
                result[v == 0] = 0.0
        if call.name in ("where", "masked_fill"):
            chosen = values[1:] if call.name == "where" else [values[0], _fill(call, values)]
            result = np.where(chosen[0] == chosen[-1], chosen[0], np.nan)
        return result

    return evaluate


def _apply(call: Call, values: list[Values]) -> Values:
    remaining = [torch.from_numpy(np.nan_to_num(v)) for v in values]

    def replaced(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            value = remaining.pop(0)
            return value if argument.is_floating_point() or argument.is_complex() else value.to(argument.dtype)
        return [replaced(item) for item in argument] if isinstance(argument, (list, tuple)) else argument

    schema = {argument.name: argument for argument in call.func._schema.arguments}
    bound = {name: replaced(value) for name, value in call.arguments.items()}
    positional = [value for name, value in bound.items() if not schema[name].kwarg_only]
    keyword = {name: value for name, value in bound.items() if schema[name].kwarg_only}
    try:
        result = call.func(*positional, **keyword)
        return np.array(result.to(torch.float64).numpy(), dtype=float)
    except Exception:  # an operator that does not take float64: nothing is known
        return np.full(len(values[0]), np.nan)


def _has_number(call: Call) -> bool:
    return any(isinstance(call.arguments.get(name), (int, float)) for name in ("self", "other", "exponent"))


def _fill(call: Call, values: list[Values]) -> Values:
    value = call.arguments["value"]
    return values[-1] if isinstance(value, Tensor) else np.full(len(values[0]), float(value))


def added(operands: Sequence[Facts], shape: tuple[int, ...], operation: Operation) -> Facts:
    """Return the facts of a sum."""
    return combined(operands, shape, operation, lambda values: np.add.reduce(values))


def copied(call: Call) -> list[Facts]:
    """`copy_`: the target takes what the source has, and its axes belong to the same units."""
    target, source = call.facts("self"), call.facts("src")
    source = expanded(source, target.shape, call.operation)
    labels = [call.operation.join(a, b) for a, b in zip(source.labels, target.labels, strict=True)]
    return [Facts(tuple(labels), source.constants, source.varies, source.uniform)]


def filled(call: Call) -> list[Facts]:
    """`fill_`, `zero_` and the like: one number everywhere."""
    facts = call.facts("self")
    value = call.arguments.get("value", 0.0)
    uniform = float(value) if isinstance(value, (int, float)) else None
    if call.name.startswith("ones"):
        uniform = 1.0
    return [Facts(facts.labels, (None,) * len(facts.labels), uniform is None, uniform)]


POINTWISE_RULES = {
    "copy": copied,
    **dict.fromkeys(("fill", "zero"), filled),
}
