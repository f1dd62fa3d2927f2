"""Steps in compiled loops, where they can be taken so."""

from __future__ import annotations

from operator import and_, gt, not_
from typing import Any

import torch
from torch import Tensor

from proxmo import shards
from proxmo.kernels import loops
from proxmo.kernels.moves import Moves, all_fit, which_fit
from proxmo.optim.base import Group, apply_prox
from proxmo.penalties.base import Penalty

LARGEST = torch.finfo(torch.float32).max


def check_fused(group: Group) -> None:
    """Raise if the option ``fused`` is not one, or contradicts another."""
    if group["fused"] not in (None, True, False):
        raise TypeError(f"fused must be True, False or None, got {group['fused']!r}")
    if group["fused"] and group["foreach"]:
        raise ValueError("fused and foreach cannot both be True")


def take_fused_steps(group: Group, moves: Moves) -> Moves:
    """Take the moves that compiled loops can take, prox included; returns the others."""
    kernels, lr, penalty, units = loops(), float(group["lr"]), group["penalty"], group["units"]
    # a step of zero leaves constraints alone, and one beyond float32 is torch's to refuse
    if kernels is None or not 0 < lr <= LARGEST:
        return moves
    signed, weight = -lr if group["maximize"] else lr, 1 - group["momentum"]
    divided = shards.any_divided(moves.params)
    parts = _own_parts(moves) if divided else moves
    together = all_fit(parts)
    if together and not divided and units is None and kernels.has_kernel(penalty):  # the usual case
        kernels.advance(moves, signed, weight, penalty)
        return Moves([], [], [])
    fit = [True] * len(parts.params) if together else which_fit(parts)
    if units is not None and not all(fit):  # units take part in a step as a whole
        return moves
    prox_too = _with_prox(kernels, group, moves.params)
    kernels.advance(parts.chosen(map(and_, fit, prox_too)), signed, weight, penalty)
    if not all(prox_too):
        moved_only = list(map(gt, fit, prox_too))
        kernels.advance(parts.chosen(moved_only), signed, weight, None)
        if penalty is not None:
            apply_prox(group, moves.chosen(moved_only).params, lr)
    if divided:
        shards.note_written(moves.params)
    return moves.chosen(map(not_, fit))


def _own_parts(moves: Moves) -> Moves:
    """What this process holds of the moves."""
    gradients = [None if gradient is None else shards.local(gradient) for gradient in moves.gradients]
    return Moves(list(map(shards.local, moves.params)), list(map(shards.local, moves.directions)), gradients)


def _with_prox(kernels: Any, group: Group, params: list[Tensor]) -> list[bool]:
    """For which of the parameters a loop can take the prox along."""
    penalty: Penalty | None = group["penalty"]
    if group["units"] is not None:
        return [False] * len(params)
    in_parts = penalty is None or penalty.separable
    return [(in_parts or not shards.is_divided(p)) and kernels.has_kernel_for(penalty, p) for p in params]
