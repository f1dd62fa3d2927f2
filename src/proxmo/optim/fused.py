"""Steps in compiled loops, where they can be taken so."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from proxmo import shards
from proxmo.kernels.moves import Move, fits
from proxmo.optim.base import Group, apply_prox


def check_fused(group: Group) -> None:
    """Raise if the option ``fused`` is not one, or contradicts another."""
    if group["fused"] not in (None, True, False):
        raise TypeError(f"fused must be True, False or None, got {group['fused']!r}")
    if group["fused"] and group["foreach"]:
        raise ValueError("fused and foreach cannot both be True")


@functools.cache
def _kernels() -> Any:
    """The compiled loops, or ``None``, with one warning, where numba is not installed."""
    try:
        from proxmo.kernels import step
    except ImportError:
        warnings.warn(
            "fused=True needs numba (pip install 'proxmo[fast]'): steps are taken the plain way", stacklevel=2
        )
        return None
    return step


def take_fused_steps(group: Group, moves: list[Move]) -> list[Move]:
    """Take the moves that compiled loops can take, prox included; returns the others."""
    kernels, lr, penalty = _kernels(), float(group["lr"]), group["penalty"]
    # a step of zero leaves constraints alone, and units take part in a step as a whole
    if kernels is None or lr == 0 or (group["units"] is not None and not all(map(_fits, moves))):
        return moves
    whole: list[Move] = []
    moved_only: list[Move] = []
    rest: list[Move] = []
    for move in moves:
        if not _fits(move):
            rest.append(move)
        elif group["units"] is None and _has_kernel(kernels, penalty, move):
            whole.append(_parts(move))
        else:
            moved_only.append(move)
    signed, weight = -lr if group["maximize"] else lr, 1 - group["momentum"]
    kernels.advance(whole, signed, weight, penalty)
    kernels.advance([_parts(move) for move in moved_only], signed, weight, None)
    if moved_only and penalty is not None:
        apply_prox(group, [move.param for move in moved_only], lr)
    return rest


def _parts(move: Move) -> Move:
    """What this process holds of a move."""
    gradient = None if move.gradient is None else shards.local(move.gradient)
    return Move(shards.local(move.param), shards.local(move.direction), gradient)


def _fits(move: Move) -> bool:
    return fits(_parts(move))


def _has_kernel(kernels: Any, penalty: Any, move: Move) -> bool:
    local = penalty is None or penalty.separable or not shards.is_divided(move.param)
    return local and bool(kernels.has_kernel(penalty, move.param))
