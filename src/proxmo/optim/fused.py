"""Steps in compiled loops, where they can be taken so."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from proxmo import shards
from proxmo.kernels import loops
from proxmo.kernels.moves import Move, fits
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
    if kernels is None or lr == 0:  # a step of zero leaves constraints alone
        return moves
    divided = shards.any_divided(move.param for move in moves)
    parts = list(map(_part, moves)) if divided else moves
    if units is not None and not all(map(fits, parts)):  # units take part in a step as a whole
        return moves
    whole: list[Move] = []
    moved_only: list[tuple[Move, Move]] = []
    rest: list[Move] = []
    for move, part in zip(moves, parts, strict=True):
        if not fits(part):
            rest.append(move)
        elif units is None and _has_kernel(kernels, penalty, move.param):
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


def _has_kernel(kernels: Any, penalty: Penalty | None, param: Tensor) -> bool:
    if penalty is None or penalty.separable:
        return bool(kernels.has_kernel(penalty, param))
    return not shards.is_divided(param) and bool(kernels.has_kernel(penalty, param))
