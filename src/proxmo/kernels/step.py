"""The loops behind fused steps and proxes.

A kernel per row moves and shrinks the rows one after the other, so that each is read from memory once.
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

from proxmo.kernels import Kernel
from proxmo.kernels.moves import Moves
from proxmo.kernels.tasks import BLOCK, CONSTANTS, Loop, inlined, keep, run, view, write

_NO_PROX = Kernel(keep, ())
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}


def advance(moves: Moves, lr: float, weight: float, kernel: Kernel | None) -> None:
    """Set param ← prox(param − lr·direction) after direction ← direction + weight·(gradient − direction).

    ``lr`` may be negative, to maximise. All moves must fit.
    """
    kernel = kernel or _NO_PROX
    dtypes = set(map(attrgetter("dtype"), moves.params))
    for dtype in dtypes:
        alike = moves if len(dtypes) == 1 else moves.chosen(p.dtype == dtype for p in moves.params)
        params, directions, gradients = alike
        sources = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        addresses = [list(map(Tensor.data_ptr, params)), list(map(Tensor.data_ptr, directions)), sources]
        run_kernel(kernel, _element_loop, _row_loop, params, dtype, addresses, [lr, weight])
        averages = [average for average, gradient in zip(directions, gradients, strict=True) if gradient is not None]
        torch.autograd.graph.increment_version(params + averages)


def prox(x: Tensor, kernel: Kernel, out: Tensor) -> None:
    """Write the prox of ``x`` to ``out``, which has the same strides and may be ``x``."""
    addresses = [[out.data_ptr()], [0], [x.data_ptr()]]
    run_kernel(kernel, _element_loop, _row_loop, [x], x.dtype, addresses, [0.0, 0.0])
    torch.autograd.graph.increment_version(out)


def run_kernel(
    kernel: Kernel,
    element_loop: Any,
    row_loop: Any,
    params: list[Tensor],
    dtype: torch.dtype,
    addresses: list[list[int]],
    numbers: list[float],
) -> None:
    """Run one of two loops made for the function of the kernel; its constants come first among the numbers."""
    if len(kernel.constants) > CONSTANTS:
        raise ValueError(f"a kernel takes at most {CONSTANTS} constants, got {len(kernel.constants)}")
    elements = list(map(Tensor.numel, params))
    if kernel.per == "element":
        loop, rows = element_loop(kernel.function), elements
    else:
        loop, rows = row_loop(kernel.function), [1 if kernel.per == "tensor" else p.shape[0] for p in params]
    constants = [_fit(c, dtype) for c in kernel.constants] + [0.0] * (CONSTANTS - len(kernel.constants))
    run(loop, dtype, addresses, rows, elements, [*constants, *numbers])


def _fit(constant: float, dtype: torch.dtype) -> float:
    """Clamp a finite constant to the finite range of ``dtype``."""
    limit = _LARGEST[dtype]
    return constant if abs(constant) <= limit or math.isinf(constant) else math.copysign(limit, constant)


@njit(error_model="numpy")
def _move(x: Any, m: Any, g: Any, lr: Any, weight: Any, prox: Any, constants: Any) -> None:
    """Average the gradient into the direction if it has a weight, then move along it and apply the prox.

    A weight or lr of zero has a branch of its own: in the formula it would make NaN of infinite numbers.
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


# Directions at address 0 ask for the prox alone, of the tensor in the place of the gradients.


@inlined
def _numbers(numbers: Any, g_at: int) -> Any:
    """Return lr, the weight of the gradient, if there is one, and the constants."""
    lr, weight = numbers[CONSTANTS], numbers[CONSTANTS + 1]
    return lr, (weight if g_at != 0 else lr - lr), numbers[:CONSTANTS]


@functools.cache
def _element_loop(prox: Any) -> Loop:
    @inlined
    def loop(places: Any, rows: int, width: int, numbers: Any) -> None:
        x_at, m_at, g_at, _ = places
        lr, weight, constants = _numbers(numbers, g_at)
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
    def loop(places: Any, rows: int, width: int, numbers: Any) -> None:
        x_at, m_at, g_at, _ = places
        lr, weight, constants = _numbers(numbers, g_at)
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
