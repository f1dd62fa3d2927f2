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
from numpy.typing import NDArray
from torch import Tensor

from proxmo.kernels.compiled import CHUNK, CONSTANTS, Loop, run, tasks, view
from proxmo.kernels.elementwise import ELEMENTWISE, Elementwise
from proxmo.kernels.moves import Move, which_fit
from proxmo.kernels.rows import ROWS, Rows
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
    return has_kernel_for(penalty, x) and which_fit([Move(x, x, None)])[0]


def advance(moves: Sequence[Move], lr: float, weight: float, penalty: Penalty | None) -> None:
    """param ← prox(param − lr·direction), where direction ← direction + weight·(gradient − direction) comes first.

    ``lr`` may be negative, to go up. All moves must fit, and the penalty have a kernel for them.
    """
    kinds: dict[tuple[torch.dtype, bool], list[Move]] = {}
    for move in moves:
        kinds.setdefault((move.param.dtype, move.gradient is None), []).append(move)
    for (dtype, given), alike in kinds.items():
        params, directions, gradients = map(list, zip(*alike, strict=True))
        elements = np.array(list(map(Tensor.numel, params)), dtype=np.int64)
        rows = np.array(_rows(penalty, params), dtype=np.int64)
        work = tasks([params, directions, directions if given else gradients], rows, elements // rows)
        run(_loop(penalty), work, _numbers(dtype, lr, 0.0 if given else weight, penalty, abs(lr)))
        torch.autograd.graph.increment_version(params if given else params + directions)


def prox(x: Tensor, step: float, penalty: Penalty, out: Tensor) -> None:
    """out ← prox(x), for tensors that are alike in memory; ``out`` may be ``x``."""
    (rows,) = _rows(penalty, [x])
    width = x.numel() // rows
    if x.numel() <= CHUNK:  # one task, in short, since small tensors take little time besides
        work = np.array([[out.data_ptr(), 0, x.data_ptr(), rows, width]], dtype=np.int64)
    else:
        work = tasks([[out], [], [x]], np.array([rows]), np.array([width]))
    run(_loop(penalty), work, _numbers(x.dtype, 0.0, 0.0, penalty, step))
    torch.autograd.graph.increment_version(out)


def _kernel(penalty: Penalty | None) -> Elementwise | Rows:
    kind = None if penalty is None else type(penalty)
    return ELEMENTWISE[kind] if kind is None or kind in ELEMENTWISE else ROWS[kind]


def _rows(penalty: Penalty | None, params: list[Tensor]) -> list[int]:
    """Of how many rows each consists: groups of the penalty, or single elements."""
    if isinstance(_kernel(penalty), Elementwise):
        return list(map(Tensor.numel, params))
    one_row = penalty.dim in (None, ())  # type: ignore[union-attr]
    return [1 if one_row else p.shape[0] for p in params]


def _loop(penalty: Penalty | None) -> Loop:
    kernel = _kernel(penalty)
    return _elementwise_loop(kernel.prox) if isinstance(kernel, Elementwise) else _row_loop(kernel.prox)


def _numbers(dtype: torch.dtype, lr: float, weight: float, penalty: Penalty | None, step: float) -> NDArray[Any]:
    """lr, weight and the constants of the prox, of which there is room for `CONSTANTS`."""
    values = [lr, weight, *(_within(c, dtype) for c in _kernel(penalty).constants(penalty, step))]
    return np.array(values + [0.0] * (2 + CONSTANTS - len(values)), dtype=NUMBERS[dtype])


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
