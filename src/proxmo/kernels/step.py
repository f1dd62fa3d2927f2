"""The step of `ProxSGD` in one pass over memory: average, gradient step and prox, while the elements are at hand.

A group penalty has its rows moved and shrunk one after the other, so that a row is read from memory once.
"""

from __future__ import annotations

import functools
import math
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from proxmo.kernels.compiled import Loop, run, view
from proxmo.kernels.elementwise import ELEMENTWISE, Elementwise, inlined, keep, write
from proxmo.kernels.moves import Moves, fits
from proxmo.kernels.rows import BLOCK, ROWS, Rows
from proxmo.penalties.axes import indexing_axes
from proxmo.penalties.base import Penalty
from proxmo.penalties.thresholds import fit


def has_kernel(penalty: Penalty | None) -> bool:
    """Whether there is a loop with the prox of this penalty for tensors of every shape that it fits."""
    kind = None if penalty is None else type(penalty)
    return kind in ELEMENTWISE or (kind in ROWS and penalty.dim in (None, (), 0, (0,)))  # type: ignore[union-attr]


def has_kernel_for(penalty: Penalty | None, x: Tensor) -> bool:
    """Whether there is one for a tensor of this shape."""
    if has_kernel(penalty):
        return True
    return type(penalty) in ROWS and indexing_axes(x, penalty.dim) == (0,)  # type: ignore[union-attr]


def takes(penalty: Penalty, x: Tensor) -> bool:
    """Whether `prox` can be asked for this tensor and ones like it."""
    return has_kernel_for(penalty, x) and fits(x)


def advance(moves: Moves, lr: float, weight: float, penalty: Penalty | None) -> None:
    """param ← prox(param − lr·direction), where direction ← direction + weight·(gradient − direction) comes first.

    ``lr`` may be negative, to go up. All moves must fit, and the penalty have a kernel for them.
    """
    dtypes = set(map(attrgetter("dtype"), moves.params))
    for dtype in dtypes:
        alike = moves if len(dtypes) == 1 else moves.chosen(p.dtype == dtype for p in moves.params)
        params, directions, gradients = alike
        addresses = [*map(Tensor.data_ptr, params), *map(Tensor.data_ptr, directions)]
        addresses += [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        numbers, elements = _numbers(dtype, lr, weight, penalty, abs(lr)), list(map(Tensor.numel, params))
        run(_loop(penalty), dtype, addresses, _rows(penalty, params, elements), elements, numbers)
        averages = [average for average, gradient in zip(directions, gradients, strict=True) if gradient is not None]
        torch.autograd.graph.increment_version(params + averages)


def prox(x: Tensor, step: float, penalty: Penalty, out: Tensor) -> None:
    """out ← prox(x), for tensors that are alike in memory; ``out`` may be ``x``."""
    addresses, numbers = [out.data_ptr(), 0, x.data_ptr()], _numbers(x.dtype, 0.0, 0.0, penalty, step)
    run(_loop(penalty), x.dtype, addresses, _rows(penalty, [x], [x.numel()]), [x.numel()], numbers)
    torch.autograd.graph.increment_version(out)


def _kernel(penalty: Penalty | None) -> Elementwise | Rows:
    kind = None if penalty is None else type(penalty)
    return ELEMENTWISE[kind] if kind is None or kind in ELEMENTWISE else ROWS[kind]


def _rows(penalty: Penalty | None, params: list[Tensor], elements: list[int]) -> list[int]:
    """Of how many rows each consists: groups of the penalty, or single elements."""
    if isinstance(_kernel(penalty), Elementwise):
        return elements
    one_row = penalty.dim in (None, ())  # type: ignore[union-attr]
    return [1 if one_row else p.shape[0] for p in params]


def _loop(penalty: Penalty | None) -> Loop:
    kernel = _kernel(penalty)
    return _elementwise_loop(kernel.prox) if isinstance(kernel, Elementwise) else _row_loop(kernel.prox)


def _numbers(dtype: torch.dtype, lr: float, weight: float, penalty: Penalty | None, step: float) -> list[float]:
    """lr, weight and the constants of the prox."""
    return [lr, weight, *[_within(c, dtype) for c in _kernel(penalty).constants(penalty, step)]]


def _within(value: float, dtype: torch.dtype) -> float:
    return value if math.isinf(value) else fit(value, dtype)


@njit(error_model="numpy")
def _move(x: Any, m: Any, g: Any, lr: Any, weight: Any, prox: Any, constants: Any) -> None:
    """Move elements along their average, which takes in the gradient first if that has a weight.

    A weight or lr of zero is not left to the first formula, in which it makes NaN of infinite numbers.
    """
    if weight != 0:
        for i in range(len(x)):
            average = m[i] + weight * (g[i] - m[i])
            m[i] = average
            x[i] = prox(x[i] - lr * average, constants)
    elif lr != 0:
        for i in range(len(x)):
            x[i] = prox(x[i] - lr * m[i], constants)
    else:
        for i in range(len(x)):
            x[i] = prox(x[i], constants)


# Without directions, at address 0, a prox alone is asked for, of what is in the place of gradients.


@functools.cache
def _elementwise_loop(prox: Any) -> Loop:
    @inlined
    def loop(x_at: int, m_at: int, g_at: int, rows: int, width: int, lr: Any, weight: Any, constants: Any) -> None:
        length = rows * width
        x, m, g = view(x_at, length, lr), view(m_at, length, lr), view(g_at, length, lr)
        if m_at == 0:
            write(x, g, prox, constants)
        else:
            _move(x, m, g, lr, weight, prox, constants)

    return loop


@functools.cache
def _row_loop(prox: Any) -> Loop:
    @inlined
    def loop(x_at: int, m_at: int, g_at: int, rows: int, width: int, lr: Any, weight: Any, constants: Any) -> None:
        length = rows * width
        x, m, g = view(x_at, length, lr), view(m_at, length, lr), view(g_at, length, lr)
        peaks = np.empty(-(-width // BLOCK), x.dtype)
        for start in range(0, length, width):
            row, source = x[start : start + width], g[start : start + width]
            if m_at != 0:
                _move(row, m[start : start + width], source, lr, weight, keep, constants)
                source = row
            prox(row, source, constants, peaks)

    return loop
