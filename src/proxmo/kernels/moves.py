"""The tensors of a step, and which of them compiled loops can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import compress, repeat
from operator import attrgetter, not_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from proxmo.eager import is_eager_cpu, row_chunks

LARGE = 1 << 18  # elements from which on the calls for one CPU tensor cost little beside it
_DTYPES = (torch.float32, torch.float64)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes


AnyMoves = TypeVar("AnyMoves", bound=Any)
"""A `NamedTuple` of lists of the same length, parameters first."""


class Moves(NamedTuple):
    """Parameters, the directions to move them in, and the gradients to average into these first, or ``None``.

    A struct of lists, so that checks run once per list.
    """

    params: list[Tensor]
    directions: list[Tensor]
    gradients: list[Tensor | None]

    def chosen(self, mask: Iterable[bool]) -> Moves:
        """Return the moves that the mask selects."""
        return chosen(self, mask)


class AdamNumbers(NamedTuple):
    """What a step needs besides tensors, after bias correction: x ← decay·x − step·m/c₁, step = size/(√v + eps)."""

    decay: float
    average_weight: float
    square_decay: float
    square_weight: float
    eps: float
    size: float
    inverse_correction: float
    sign: float


def chosen(moves: AnyMoves, mask: Iterable[bool]) -> AnyMoves:
    """Return the rows of a struct of lists that the mask selects."""
    mask = list(mask)
    selected: AnyMoves = moves._make(list(compress(column, mask)) for column in moves)
    return selected


def in_cache(
    moves: AnyMoves, acts_on_rows: Callable[[Tensor], bool], elements: int | None = None
) -> Iterator[AnyMoves]:
    """Yield moves in batches whose passes over memory stay in cache: all small ones, then each large tensor.

    The first list holds the parameters. Large ones are cut into row chunks of about so many elements, as views, where
    the prox acts on rows, and so is everything else with as many rows.
    """
    large = [p.numel() >= LARGE and is_eager_cpu(p) for p in moves[0]]
    if not all(large):
        yield chosen(moves, map(not_, large))
    for param, *others in zip(*chosen(moves, large), strict=True):
        alike = all(t.dim() and len(t) == len(param) for t in others if isinstance(t, Tensor))
        count = row_chunks(param, elements) if alike else 1
        if count == 1 or not acts_on_rows(param):
            yield moves._make([value] for value in (param, *others))
            continue
        columns = [value.chunk(count) if isinstance(value, Tensor) else repeat(value) for value in (param, *others)]
        for chunks in zip(*columns, strict=False):
            yield moves._make([chunk] for chunk in chunks)


def which_fit(moves: Moves) -> list[bool]:
    """Return for each move whether compiled loops can take it."""
    if all_fit(moves):
        return [True] * len(moves.params)
    return [all_fit(Moves([param], [direction], [gradient])) for param, direction, gradient in zip(*moves, strict=True)]


def all_fit(moves: Moves) -> bool:
    """Whether compiled loops can take all moves: dense CPU tensors of float32 or float64 with matching strides.

    Runs every step, so each question is asked of whole lists.
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
        and (all(map(Tensor.is_contiguous, tensors)) or all(map(_have_same_rows, *moves)))
    )


def takes(x: Tensor) -> bool:
    """Whether compiled loops can run on ``x``, an eager CPU tensor, and another with the same strides."""
    return x.dtype in _DTYPES and x.numel() > 0 and not x.is_neg() and _has_rows(x)


def _have_same_rows(x: Tensor, direction: Tensor, gradient: Tensor | None) -> bool:
    others = [t for t in (direction, gradient) if t is not None]
    return _has_rows(x) and all(t.shape == x.shape and t.stride() == x.stride() for t in others)


def _has_rows(x: Tensor) -> bool:
    """Whether the rows along the first axis follow one another in memory without gaps."""
    order = _CHANNELS_LAST.get(x.dim())
    return x.is_contiguous() or (order is not None and x.is_contiguous(memory_format=order))
