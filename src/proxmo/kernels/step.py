"""The step of `ProxSGD` in one pass over memory: average, gradient step and prox, while the elements are at hand.

A group penalty has its rows moved and shrunk one after the other, so that a row is read from memory once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from proxmo.kernels.compiled import CONSTANTS, Loop, run, tasks, view
from proxmo.kernels.elementwise import ELEMENTWISE
from proxmo.kernels.moves import Move, which_fit
from proxmo.kernels.rows import ROWS
from proxmo.penalties.axes import indexing_axes
from proxmo.penalties.base import Penalty
from proxmo.penalties.thresholds import fit

NUMBERS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


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
    return has_kernel_for(penalty, x) and all(which_fit([Move(x, x, None)]))


def advance(moves: Sequence[Move], lr: float, weight: float, penalty: Penalty | None) -> None:
    """param ← prox(param − lr·direction), where direction ← direction + weight·(gradient − direction) comes first.

    ``lr`` may be negative, to go up. All moves must fit, and the penalty have a kernel for them.
    """
    kinds: dict[tuple[torch.dtype, bool], list[Move]] = {}
    for move in moves:
        kinds.setdefault((move.param.dtype, move.gradient is None), []).append(move)
    for (_, given), alike in kinds.items():
        params, directions, gradients = map(list, zip(*alike, strict=True))
        _run([params, directions, directions if given else gradients], lr, 0.0 if given else weight, penalty, abs(lr))


def prox(x: Tensor, step: float, penalty: Penalty, out: Tensor) -> None:
    """out ← prox(x), for tensors that are alike in memory; ``out`` may be ``x``."""
    _run([[out], [], [x]], 0.0, 0.0, penalty, step)


def _run(columns: list[list[Tensor]], lr: float, weight: float, penalty: Penalty | None, step: float) -> None:
    """Go through columns of parameters, directions and gradients, which are all of one dtype.

    Without directions, parameters become the prox of what is in the place of gradients.
    """
    params, kind = columns[0], None if penalty is None else type(penalty)
    elements = np.array(list(map(Tensor.numel, params)), dtype=np.int64)
    if kind in ELEMENTWISE:
        prox, constants = ELEMENTWISE[kind]
        loop, rows = _elementwise_loop(prox), elements
    else:
        assert kind is not None
        prox, constants = ROWS[kind]
        one_row = penalty.dim in (None, ())  # type: ignore[union-attr]
        loop, rows = _row_loop(prox), np.array([1 if one_row else p.shape[0] for p in params], dtype=np.int64)
    dtype = params[0].dtype
    numbers = np.zeros(2 + CONSTANTS, NUMBERS[dtype])
    values = [lr, weight, *(_within(c, dtype) for c in constants(penalty, step))]
    numbers[: len(values)] = values
    run(loop, tasks(columns, rows, elements // rows), numbers)
    torch.autograd.graph.increment_version(columns[0] + columns[1])


def _within(value: float, dtype: torch.dtype) -> float:
    return value if math.isinf(value) else fit(value, dtype)


@njit(error_model="numpy")
def _move(x: Any, m: Any, g: Any, moves: bool, lr: Any, weight: Any, prox: Any, constants: Any) -> None:
    """Move elements along their average, which takes in the gradient first if that has a weight; or take the prox only.

    A weight or lr of zero is not left to the second formula, in which it makes NaN of infinite numbers.
    """
    if not moves:
        for i in range(len(x)):
            x[i] = prox(g[i], constants)
    elif weight != 0:
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


@functools.cache
def _elementwise_loop(prox: Any) -> Loop:
    @njit(error_model="numpy")
    def loop(task: Any, lr: Any, weight: Any, constants: Any) -> None:
        length = task[3] * task[4]
        x, m, g = view(task[0], length, lr), view(task[1], length, lr), view(task[2], length, lr)
        _move(x, m, g, task[1] != 0, lr, weight, prox, constants)

    return loop


@functools.cache
def _row_loop(prox: Any) -> Loop:
    keep = ELEMENTWISE[None].prox

    @njit(error_model="numpy")
    def loop(task: Any, lr: Any, weight: Any, constants: Any) -> None:
        rows, width = task[3], task[4]
        length = rows * width
        x, m, g = view(task[0], length, lr), view(task[1], length, lr), view(task[2], length, lr)
        for start in range(0, length, width):
            end = start + width
            _move(x[start:end], m[start:end], g[start:end], task[1] != 0, lr, weight, keep, constants)
            prox(x[start:end], constants)

    return loop
