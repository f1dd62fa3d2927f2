"""The loops behind fused steps of `ProxAdamW`: both moments, decay, move and prox in one pass over memory.

The prox has a step of its own for every element. A kernel per row moves and shrinks the rows one after the other, with
the steps of a row in scratch memory.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from proxmo.kernels import AdamNumbers, Kernel
from proxmo.kernels.step import run_kernel
from proxmo.kernels.tasks import CONSTANTS, Loop, inlined, view


@inlined
def _keep(x: Any, step: Any, c: Any) -> Any:
    return x


_NO_PROX = Kernel(_keep, ())


def advance_adam(
    params: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    numbers: AdamNumbers,
    kernel: Kernel | None,
) -> None:
    """Take a step for tensors of one dtype, which must fit; ``kernel`` is a `Penalty.metric_kernel`."""
    addresses = [list(map(Tensor.data_ptr, tensors)) for tensors in (params, averages, gradients, squares)]
    run_kernel(kernel or _NO_PROX, _element_loop, _row_loop, params, params[0].dtype, addresses, list(numbers))
    torch.autograd.graph.increment_version([*params, *averages, *squares])


@njit(error_model="numpy", forceinline=True)
def _move(x: Any, m: Any, g: Any, v: Any, steps: Any, numbers: Any, prox: Any, constants: Any) -> None:
    """Update both moments, move, and apply the prox of an element; keep the steps if there is room for them."""
    decay, weight, square_decay, square_weight = numbers[0], numbers[1], numbers[2], numbers[3]
    eps, size, inverse, sign = numbers[4], numbers[5], numbers[6], numbers[7]
    for i in range(len(x)):
        gradient = sign * g[i]
        average = m[i] + weight * (gradient - m[i])
        square = square_decay * v[i] + square_weight * gradient * gradient
        m[i] = average
        v[i] = square
        step = size / (np.sqrt(square) + eps)
        if len(steps) > 0:
            steps[i] = step
        x[i] = prox(decay * x[i] - step * (average * inverse), step, constants)


@functools.cache
def _element_loop(prox: Any) -> Loop:
    @inlined
    def loop(places: Any, rows: int, width: int, numbers: Any) -> None:
        length, one = rows * width, numbers[0]
        x, m = view(places[0], length, one), view(places[1], length, one)
        g, v = view(places[2], length, one), view(places[3], length, one)
        _move(x, m, g, v, x[:0], numbers[CONSTANTS:], prox, numbers[:CONSTANTS])

    return loop


@functools.cache
def _row_loop(prox: Any) -> Loop:
    @inlined
    def loop(places: Any, rows: int, width: int, numbers: Any) -> None:
        length, one = rows * width, numbers[0]
        x, m = view(places[0], length, one), view(places[1], length, one)
        g, v = view(places[2], length, one), view(places[3], length, one)
        steps = np.empty(width, x.dtype)
        for start in range(0, length, width):
            end = start + width
            _move(x[start:end], m[start:end], g[start:end], v[start:end], steps, numbers[CONSTANTS:], _keep, numbers)
            prox(x[start:end], steps, numbers[:CONSTANTS])

    return loop
