"""Fused steps: average, gradient step and prox in one pass over memory."""

from __future__ import annotations

import math
from operator import and_, gt, not_

import torch
from torch import Tensor

from proxmo import kernels, shards
from proxmo.kernels import AdamNumbers, Moves
from proxmo.kernels.moves import chosen
from proxmo.optim.moments import Moments
from proxmo.optim.options import Group
from proxmo.optim.proximal_step import apply_prox, without_step
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


def take_fused_adam_steps(group: Group, moments: Moments) -> Moments:
    """Take the steps of `ProxAdamW` that compiled loops can take, prox included; return the others."""
    penalty, lr = group["penalty"], float(group["lr"])
    if group["units"] is not None or not kernels.available() or not 0 < lr <= LARGEST:
        return moments
    kernel = None if penalty is None else penalty.current_metric_kernel()
    if penalty is not None and kernel is None:
        return moments
    params, gradients, averages, squares = (list(map(shards.local, column)) for column in moments[:4])
    local = Moments(params, gradients, averages, squares, moments.counts)
    fit = map(and_, *(kernels.which_fit(Moves(local.params, states, list(local.gradients))) for states in local[2:4]))
    alone = [penalty is None or _is_local(penalty, p) for p in moments.params]
    taken = list(map(and_, fit, alone))
    for kind in {(p.dtype, count) for p, count, take in zip(local.params, local.counts, taken, strict=True) if take}:
        alike = [take and (p.dtype, k) == kind for p, k, take in zip(local.params, local.counts, taken, strict=True)]
        params, gradients, averages, squares, _ = chosen(local, alike)
        kernels.advance_adam(params, gradients, averages, squares, _adam_numbers(group, lr, kind[1]), kernel)
    shards.mark_written([p for p, take in zip(moments.params, taken, strict=True) if take])
    return chosen(moments, map(not_, taken))


def _adam_numbers(group: Group, lr: float, count: float) -> AdamNumbers:
    beta1, beta2 = group["betas"]
    correction = math.sqrt(1 - beta2**count)
    return AdamNumbers(
        decay=1 - lr * group["weight_decay"],
        average_weight=1 - beta1,
        square_decay=beta2,
        square_weight=1 - beta2,
        eps=group["eps"] * correction,
        size=lr * correction,
        inverse_correction=1 / (1 - beta1**count),
        sign=-1.0 if group["maximize"] else 1.0,
    )


def _local_shards(moves: Moves) -> Moves:
    gradients = [None if gradient is None else shards.local(gradient) for gradient in moves.gradients]
    return Moves(list(map(shards.local, moves.params)), list(map(shards.local, moves.directions)), gradients)


def _is_local(penalty: Penalty, p: Tensor) -> bool:
    """Whether the prox of each shard is known without the others."""
    return penalty.separable or not shards.is_sharded(p)
