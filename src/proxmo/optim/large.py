"""Steps of large tensors on a CPU, part by part: each pass over memory finds in cache what the last left there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import not_

import torch
from torch import Tensor

from proxmo.kernels.moves import Moves
from proxmo.optim.base import Group
from proxmo.parts import is_at_hand, number_of_parts
from proxmo.penalties.base import Penalty

LARGE = 1 << 16  # elements, from which on calls take little beside them
Part = tuple[Tensor, Tensor, Tensor | None]


def large_and_others(group: Group, moves: Moves) -> tuple[Moves, Moves]:
    """The moves of large tensors that `take_large_steps` can take, and all the others."""
    if group["foreach"] or group["units"] is not None or isinstance(group["lr"], Tensor):
        return Moves([], [], []), moves
    large = [move[0].numel() >= LARGE and _need_no_conversion(*move) for move in zip(*moves, strict=True)]
    return moves.chosen(large), moves.chosen(map(not_, large))


def take_large_steps(group: Group, moves: Moves) -> None:
    """Average, gradient step and prox of each part in turn."""
    lr, penalty = group["lr"], group["penalty"]
    weight, scale = 1 - group["momentum"], lr if group["maximize"] else -lr
    # Listed before the first is taken: what runs between two parts runs with a cache full of them, slowly.
    parts = [part for move in zip(*moves, strict=True) for part in _parts(penalty, *move)]
    for param, direction, gradient in parts:
        if gradient is not None:
            direction.lerp_(gradient, weight)
        param.add_(direction, alpha=scale)
        if penalty is not None and lr != 0:
            penalty.apply_in_one_piece(param, lr)


def _need_no_conversion(param: Tensor, *others: Tensor | None) -> bool:
    return (
        is_at_hand(param)
        and param.dtype in (torch.float32, torch.float64)
        and all(t.dtype == param.dtype and t.shape == param.shape for t in others if t is not None)
    )


def _parts(penalty: Penalty | None, param: Tensor, direction: Tensor, gradient: Tensor | None) -> Iterable[Part]:
    count = number_of_parts(param) if penalty is None or penalty.acts_on_rows(param) else 1
    if count == 1:
        return [(param, direction, gradient)]
    gradients = repeat(None) if gradient is None else gradient.chunk(count)
    return zip(param.chunk(count), direction.chunk(count), gradients, strict=False)
