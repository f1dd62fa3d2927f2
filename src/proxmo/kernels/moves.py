"""What a fused step is made of, and which tensors it can take."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

_DTYPES = (torch.float32, torch.float64)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes


class Move(NamedTuple):
    """A parameter, the direction to move it in, and the gradient to average into the direction first, if any."""

    param: Tensor
    direction: Tensor
    gradient: Tensor | None


def which_fit(moves: Sequence[Move]) -> list[bool]:
    """Whether compiled loops can take each: ordinary dense tensors of full precision, alike in memory.

    Mostly they can take all, which is asked in every step; so it is asked of all at once first.
    """
    return [True] * len(moves) if _fit(moves) else [_fit([move]) for move in moves]


def _fit(moves: Sequence[Move]) -> bool:
    tensors = [t for move in moves for t in move if t is not None]
    sizes = [move.param.numel() for move in moves]
    return (
        set(map(type, tensors)) <= {Parameter, Tensor}
        and all(map(attrgetter("is_cpu"), tensors))
        and set(map(attrgetter("dtype"), tensors)) in [{dtype} for dtype in _DTYPES]
        and not any(map(Tensor.is_neg, tensors))
        and all(sizes)
        and sizes == [move.direction.numel() for move in moves]
        and all(move.gradient is None or move.gradient.numel() == size for move, size in zip(moves, sizes, strict=True))
        and (all(map(Tensor.is_contiguous, tensors)) or all(map(_have_rows, moves)))
    )


def fits(x: Tensor) -> bool:
    """Whether compiled loops can take an ordinary tensor on a CPU, and another like it."""
    return x.dtype in _DTYPES and x.numel() > 0 and not x.is_neg() and _has_rows(x)


def _have_rows(move: Move) -> bool:
    """Whether elements lie in the same order, in whichever the rows along the first axis follow one another."""
    x, direction, gradient = move
    others = [t for t in (direction, gradient) if t is not None]
    return _has_rows(x) and all(t.shape == x.shape and t.stride() == x.stride() for t in others)


def _has_rows(x: Tensor) -> bool:
    order = _CHANNELS_LAST.get(x.dim())
    return x.is_contiguous() or (order is not None and x.is_contiguous(memory_format=order))
