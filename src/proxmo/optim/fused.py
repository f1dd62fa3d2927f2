"""Fused steps: average, gradient step and prox in one pass over memory."""

from __future__ import annotations

from operator import and_, gt, not_

import torch
from torch import Tensor

from proxmo import kernels, shards
from proxmo.kernels import Moves
from proxmo.optim.base import apply_prox, without_step
from proxmo.optim.options import Group
from proxmo.optim.units import units_of
from proxmo.penalties.base import Penalty

LARGEST = torch.finfo(torch.float32).max


def check_fused(group: Group) -> None:
    """Raise if the option ``fused`` is not one, or contradicts another."""
    if group["fused"] not in (None, True, False):
        raise TypeError(f"fused must be True, False or None, got {group['fused']!r}")
    if group["fused"] and group["foreach"]:
        raise ValueError("fused and foreach cannot both be True")


def take_fused_steps(group: Group, moves: Moves) -> Moves:
    """Take the moves that compiled loops can take, prox included; return the others."""
    sharded, units, penalty = shards.any_sharded(moves.params), units_of(group, moves.params), group["penalty"]
    local = _local_shards(moves) if sharded else moves
    fit = kernels.which_fit(local)
    together = units is not None or (penalty is not None and penalty.joint)
    if not kernels.available() or not any(fit) or (together and not all(fit)):
        return moves
    lr = float(group["lr"])
    # A step of zero leaves constraints alone, and torch refuses one beyond float32: both are left to the eager path.
    if not 0 < lr <= LARGEST:
        return moves
    signed, weight = -lr if group["maximize"] else lr, 1 - float(group["momentum"])
    kernel = None if penalty is None or units is not None else penalty.current_kernel(lr)
    with_prox = [penalty is None or (kernel is not None and _is_local(penalty, p)) for p in moves.params]
    if all(map(and_, fit, with_prox)):  # the usual case
        kernels.advance(local, signed, weight, kernel)
    else:
        kernels.advance(local.chosen(map(and_, fit, with_prox)), signed, weight, kernel)
        only_moved = list(map(gt, fit, with_prox))
        if any(only_moved):
            kernels.advance(local.chosen(only_moved), signed, weight, None)
            apply_prox(penalty, units, moves.chosen(only_moved).params, lr, without_step(group, moves.params))
    if sharded:
        shards.mark_written(moves.params)
    return moves.chosen(map(not_, fit))


def _local_shards(moves: Moves) -> Moves:
    gradients = [None if gradient is None else shards.local(gradient) for gradient in moves.gradients]
    return Moves(list(map(shards.local, moves.params)), list(map(shards.local, moves.directions)), gradients)


def _is_local(penalty: Penalty, p: Tensor) -> bool:
    """Whether the prox of each shard is known without the others."""
    return penalty.separable or not shards.is_sharded(p)
