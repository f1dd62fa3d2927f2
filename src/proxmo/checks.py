"""Argument checks.

Each returns the value in plain form, or raises an error that names the argument, what it got and what it takes.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from proxmo import shards
from proxmo.eager import is_transformed

Dim = int | tuple[int, ...] | None
"""The axes that index the groups of a tensor; ``None`` makes the whole tensor one group."""
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def number(name: str, value: Any, *, takes: str = "a number") -> float:
    """Any real number but NaN, as a float."""
    if type(value) is float and value == value:  # fast path: runs every step
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {takes}, got {value!r}")
    try:
        result = float(value)
    except OverflowError:  # an integer beyond the range of floats
        result = -math.inf if value < 0 else math.inf
    if math.isnan(result):
        raise ValueError(f"{name} must be {takes}, got {value!r}")
    return result


def nonnegative(name: str, value: Any) -> float:
    """A finite float ≥ 0."""
    takes = "a finite number >= 0"
    result = number(name, value, takes=takes)
    if not 0 <= result < math.inf:
        raise ValueError(f"{name} must be {takes}, got {value!r}")
    return result


def share(name: str, value: Any, *, takes: str = "a share in (0, 1]") -> float:
    """A float in (0, 1]."""
    result = number(name, value, takes=takes)
    if not 0 < result <= 1:
        raise ValueError(f"{name} must be {takes}, got {value!r}")
    return result


def more_than(bound: float, name: str, value: Any) -> float:
    """A finite float > ``bound``."""
    takes = f"a finite number > {bound:g}"
    result = number(name, value, takes=takes)
    if not bound < result < math.inf:
        raise ValueError(f"{name} must be {takes}, got {value!r}")
    return result


def count(name: str, value: Any, *, least: int = 0) -> int:
    """An integer ≥ ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return int(value)


def dim(name: str, value: Any) -> Dim:
    """``None``, an axis, or a sequence of axes without repetition, as a tuple."""
    takes = "an axis, a tuple of distinct axes or None"
    if value is None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(axis, Integral) and not isinstance(axis, bool) for axis in value
    ):
        raise TypeError(f"{name} must be {takes}, got {value!r}")
    if len(set(value)) < len(value):
        raise ValueError(f"{name} must be {takes}, got {value!r}")
    return tuple(int(axis) for axis in value)


def floating(name: str, value: Any) -> Tensor:
    """A strided tensor of real floating-point numbers."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in FLOATING or value.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor of 16 to 64 bit floats, got {value.dtype} with layout {value.layout}"
        )
    return value


def scalar_step(name: str, value: Any) -> float | Tensor:
    """A finite step size ≥ 0: a number, or a tensor of one element, which becomes 0-d."""
    if not isinstance(value, Tensor):
        return nonnegative(name, value)
    if value.numel() != 1 or value.is_complex():
        raise ValueError(f"Tensor {name} must be 1-element and real, got {value.dtype} of shape {tuple(value.shape)}")
    if not torch.compiler.is_compiling():
        nonnegative(name, value.item())
    return value.detach().reshape(())


def step(name: str, value: Any, x: Tensor) -> float | Tensor:
    """A `scalar_step`, or a tensor of finite steps ≥ 0 that broadcasts to ``x``."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return scalar_step(name, value)
    takes = f"a finite number >= 0, or a float tensor of such numbers that broadcasts to x of shape {tuple(x.shape)}"
    fits = value.dim() <= x.dim() and all(
        size in (1, wanted) for size, wanted in zip(reversed(value.shape), reversed(x.shape), strict=False)
    )
    if not fits or not value.is_floating_point() or value.device != x.device:
        got = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
        raise ValueError(f"{name} must be {takes}, got {got}")
    if not (torch.compiler.is_compiling() or is_transformed(value)):
        numbers = shards.local(value)
        bad = numbers[~((numbers >= 0) & (numbers < math.inf))]
        if bad.numel():
            raise ValueError(f"{name} must be {takes}, got one with {bad[0].item()}")
    return value.detach()


def same_as(name: str, value: Tensor | None, model: Tensor) -> None:
    """A tensor with the shape, dtype, device and placements of ``model``, or ``None``."""
    if value is None:
        return
    expected = (tuple(model.shape), model.dtype, model.device)
    got = (tuple(value.shape), value.dtype, value.device)
    if got != expected:
        raise ValueError(f"{name} must match x in shape, dtype and device, {expected}, got {got}")
    placements, got_placements = (getattr(t, "placements", None) for t in (model, value))
    if got_placements != placements:
        raise ValueError(f"{name} must be sharded as x is, {placements}, got {got_placements}")
