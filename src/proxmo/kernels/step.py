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

from proxmo.kernels.compiled import CHUNK, Loop, addresses, share_out, tasks, view
from proxmo.kernels.elementwise import ELEMENTWISE
from proxmo.kernels.moves import Move, fits
from proxmo.kernels.rows import ROWS
from proxmo.penalties.axes import indexing_axes
from proxmo.penalties.base import Penalty
from proxmo.penalties.thresholds import fit

DTYPES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


def has_kernel(penalty: Penalty | None, x: Tensor) -> bool:
    """Whether there is a loop with the prox of this penalty for a tensor of this shape."""
    kind = None if penalty is None else type(penalty)
    if kind in ELEMENTWISE:
        return True
    return kind in ROWS and set(indexing_axes(x, penalty.dim)) <= {0}  # type: ignore[union-attr]


def takes(penalty: Penalty, x: Tensor) -> bool:
    """Whether `prox_` can be asked for this tensor."""
    return fits(Move(x, x, None)) and has_kernel(penalty, x)


def advance(moves: Sequence[Move], lr: float, weight: float, penalty: Penalty | None) -> None:
    """param ← prox(param − lr·direction), where direction ← direction + weight·(gradient − direction) comes first.

    ``lr`` may be negative, to go up. All moves must fit, and the penalty have a kernel for them.
    """
    for dtype in {move.param.dtype for move in moves}:
        same = [move for move in moves if move.param.dtype == dtype]
        averaged = [move for move in same if move.gradient is not None]
        given = [move for move in same if move.gradient is None]
        for some, share in ((averaged, weight), (given, 0.0)):
            if some:
                gradients = [move.direction if move.gradient is None else move.gradient for move in some]
                _run([[m.param for m in some], [m.direction for m in some], gradients], lr, share, penalty, abs(lr))


def prox_(x: Tensor, step: float, penalty: Penalty) -> None:
    """x ← prox(x)."""
    _run([[x], [x], [x]], 0.0, 0.0, penalty, step)


def _run(columns: list[list[Tensor]], lr: float, weight: float, penalty: Penalty | None, step: float) -> None:
    """Go through columns of parameters, directions and gradients, which are all of one dtype."""
    params = columns[0]
    number = DTYPES[params[0].dtype]
    kind = None if penalty is None else type(penalty)
    if kind in ELEMENTWISE:
        prox, constants = ELEMENTWISE[kind]
        sizes = np.array([p.numel() for p in params], dtype=np.int64)
        widths, loop = np.ones_like(sizes), _elementwise_loop(prox)
    else:
        assert kind is not None
        prox, constants = ROWS[kind]
        loop = _row_loop(prox)
        sizes = np.array([_rows(p, penalty) for p in params], dtype=np.int64)
        widths = np.array([p.numel() for p in params], dtype=np.int64) // sizes
    per_task = np.maximum(CHUNK // widths, 1)
    arguments = (addresses(*columns), sizes, widths, per_task, number(lr), number(weight))
    share_out(
        loop,
        tasks(sizes, per_task),
        *arguments,
        tuple(number(_within(c, params[0].dtype)) for c in constants(penalty, step)),
    )
    torch.autograd.graph.increment_version([t for column in columns[:2] for t in column])


def _rows(x: Tensor, penalty: Any) -> int:
    return x.shape[0] if indexing_axes(x, penalty.dim) else 1


def _within(value: float, dtype: torch.dtype) -> float:
    return value if math.isinf(value) else fit(value, dtype)


@njit(nogil=True, error_model="numpy")
def _move(x: Any, addresses: Any, start: Any, lr: Any, weight: Any, prox: Any, constants: Any) -> None:
    """Move the elements of a view along their average, which takes in the gradient first if that has a weight.

    The last two cases are not left to the first formula, in which a weight or lr of zero makes NaN of infinite numbers.
    """
    m, g = view(addresses[1], start, len(x), lr), view(addresses[2], start, len(x), lr)
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


@functools.cache
def _elementwise_loop(prox: Any) -> Loop:
    @njit(nogil=True, error_model="numpy")
    def loop(
        work: Any, table: Any, sizes: Any, widths: Any, per_task: Any, lr: Any, weight: Any, constants: Any
    ) -> None:
        for task in range(len(work)):
            index, start = work[task]
            x = view(table[index, 0], start, min(per_task[index], sizes[index] - start), lr)
            _move(x, table[index], start, lr, weight, prox, constants)

    return loop


@functools.cache
def _row_loop(prox: Any) -> Loop:
    keep = ELEMENTWISE[None].prox

    @njit(nogil=True, error_model="numpy")
    def loop(
        work: Any, table: Any, sizes: Any, widths: Any, per_task: Any, lr: Any, weight: Any, constants: Any
    ) -> None:
        for task in range(len(work)):
            index, first = work[task]
            for row in range(first, min(first + per_task[index], sizes[index])):
                start = row * widths[index]
                x = view(table[index, 0], start, widths[index], lr)
                _move(x, table[index], start, lr, weight, keep, constants)
                prox(x, constants)

    return loop
