"""What a step is made of, and which tensors compiled loops can take."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

_DTYPES = (torch.float32, torch.float64)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes


class Moves(NamedTuple):
    """Parameters, the directions to move them in, and the gradients to average into these first, or ``None``.

    Lists of tensors, not a list of moves: every step asks much of all of them, which is soon done list by list.
    """

    params: list[Tensor]
    directions: list[Tensor]
    gradients: list[Tensor | None]

    def chosen(self, which: Iterable[bool]) -> Moves:
        """Those for which it is true."""
        which = list(which)
        return Moves(
            list(compress(self.params, which)),
            list(compress(self.directions, which)),
            list(compress(self.gradients, which)),
        )


def which_fit(moves: Moves) -> list[bool]:
    """For each whether compiled loops can take it."""
    return [all_fit(Moves([param], [direction], [gradient])) for param, direction, gradient in zip(*moves, strict=True)]


def all_fit(moves: Moves) -> bool:
    """Whether compiled loops can take all of them: ordinary dense tensors of full precision, alike in memory.

    It is asked in every step, so it is asked of all at once.
    """
    params, directions, gradients = moves
    tensors = [*params, *directions, *[gradient for gradient in gradients if gradient is not None]]
    sizes = list(map(Tensor.numel, params))
    return (
        set(map(type, tensors)) <= {Parameter, Tensor}
        and all(map(attrgetter("is_cpu"), tensors))
        and set(map(attrgetter("dtype"), tensors)) in [{dtype} for dtype in _DTYPES]
        and not any(map(Tensor.is_neg, tensors))
        and all(sizes)
        and sizes == list(map(Tensor.numel, directions))
        and sizes == [n if gradient is None else gradient.numel() for gradient, n in zip(gradients, sizes, strict=True)]
        and (all(map(Tensor.is_contiguous, tensors)) or all(map(_have_rows, *moves)))
    )


def fits(x: Tensor) -> bool:
    """Whether compiled loops can take an ordinary tensor on a CPU, and another like it."""
    return x.dtype in _DTYPES and x.numel() > 0 and not x.is_neg() and _has_rows(x)


def _have_rows(x: Tensor, direction: Tensor, gradient: Tensor | None) -> bool:
    """Whether elements lie in the same order, in whichever the rows along the first axis follow one another."""
    others = [t for t in (direction, gradient) if t is not None]
    return _has_rows(x) and all(t.shape == x.shape and t.stride() == x.stride() for t in others)


def _has_rows(x: Tensor) -> bool:
    order = _CHANNELS_LAST.get(x.dim())
    return x.is_contiguous() or (order is not None and x.is_contiguous(memory_format=order))
