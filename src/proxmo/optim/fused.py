"""Steps in compiled loops, where they can be taken so."""

from __future__ import annotations

from typing import Any

import torch

from proxmo import shards
from proxmo.kernels import loops
from proxmo.kernels.moves import Move, which_fit
from proxmo.optim.base import Group, apply_prox
from proxmo.penalties.base import Penalty


def check_fused(group: Group) -> None:
    """Raise if the option ``fused`` is not one, or contradicts another."""
    if group["fused"] not in (None, True, False):
        raise TypeError(f"fused must be True, False or None, got {group['fused']!r}")
    if group["fused"] and group["foreach"]:
        raise ValueError("fused and foreach cannot both be True")


def take_fused_steps(group: Group, moves: list[Move]) -> list[Move]:
    """Take the moves that compiled loops can take, prox included; returns the others."""
    kernels, lr, penalty, units = loops(), float(group["lr"]), group["penalty"], group["units"]
    # a step of zero leaves constraints alone, and one beyond float32 is torch's to refuse
    if kernels is None or not 0 < lr <= torch.finfo(torch.float32).max:
        return moves
    divided = shards.any_divided([move.param for move in moves])
    parts = list(map(_part, moves)) if divided else moves
    fit = which_fit(parts)
    if units is not None and not all(fit):  # units take part in a step as a whole
        return moves
    whole: list[Move] = []
    moved_only: list[tuple[Move, Move]] = []
    rest: list[Move] = []
    for move, part, fits, prox_too in zip(moves, parts, fit, _with_prox(kernels, group, moves, divided), strict=True):
        if not fits:
            rest.append(move)
        elif prox_too:
            whole.append(part)
        else:
            moved_only.append((move, part))
    signed, weight = -lr if group["maximize"] else lr, 1 - group["momentum"]
    kernels.advance(whole, signed, weight, penalty)
    kernels.advance([part for _, part in moved_only], signed, weight, None)
    if moved_only and penalty is not None:
        apply_prox(group, [move.param for move, _ in moved_only], lr)
    if divided:
        shards.note_written([move.param for move in moves])
    return rest


def _part(move: Move) -> Move:
    """What this process holds of a move."""
    gradient = None if move.gradient is None else shards.local(move.gradient)
    return Move(shards.local(move.param), shards.local(move.direction), gradient)


def _with_prox(kernels: Any, group: Group, moves: list[Move], divided: bool) -> list[bool]:
    """For which of the moves a loop can take the prox along."""
    penalty: Penalty | None = group["penalty"]
    if group["units"] is not None:
        return [False] * len(moves)
    in_parts = penalty is None or penalty.separable
    if kernels.has_kernel(penalty) and (in_parts or not divided):  # the usual case, without a look at each
        return [True] * len(moves)
    return [
        (in_parts or not shards.is_divided(move.param)) and kernels.has_kernel_for(penalty, move.param)
        for move in moves
    ]
