"""Steps of large tensors on a CPU, part by part: each pass over memory finds in cache what the last left there."""

from __future__ import annotations

import torch
from torch import Tensor

from proxmo.kernels.moves import Move
from proxmo.optim.base import Group
from proxmo.parts import is_at_hand, rows_to_a_part
from proxmo.penalties.base import Penalty

LARGE = 1 << 16  # elements, from which on calls take little beside them


def take_large_steps(group: Group, moves: list[Move]) -> list[Move]:
    """Take the moves of large tensors that need no conversion, prox included; returns the others."""
    if group["foreach"] or group["units"] is not None or isinstance(group["lr"], Tensor):
        return moves
    others = []
    for move in moves:
        if _is_large(move):
            _take_step(group, move)
        else:
            others.append(move)
    return others


def _is_large(move: Move) -> bool:
    param, direction, gradient = move
    return (
        param.numel() >= LARGE
        and is_at_hand(param)
        and param.dtype in (torch.float32, torch.float64)
        and all(t.dtype == param.dtype and t.shape == param.shape for t in (direction, gradient) if t is not None)
    )


def _take_step(group: Group, move: Move) -> None:
    lr, penalty = group["lr"], group["penalty"]
    weight, scale = 1 - group["momentum"], lr if group["maximize"] else -lr
    for param, direction, gradient in _parts(penalty, move):
        if gradient is not None:
            direction.lerp_(gradient, weight)
        param.add_(direction, alpha=scale)
        if penalty is not None:
            penalty.apply_to_all([param], lr)


def _parts(penalty: Penalty | None, move: Move) -> list[Move]:
    rows = rows_to_a_part(move.param)
    if rows is None or not (penalty is None or penalty.acts_on_rows(move.param)):
        return [move]
    params, directions = torch.split(move.param, rows), torch.split(move.direction, rows)
    gradients = [None] * len(params) if move.gradient is None else torch.split(move.gradient, rows)
    return [Move(*part) for part in zip(params, directions, gradients, strict=True)]
