"""What methods share whose step evaluates the loss itself, or looks at all parameters together."""

from __future__ import annotations

from torch import Tensor

from proxmo import shards
from proxmo.optim.base import ProxOptimizer
from proxmo.secants import square


def all_params(optimizer: ProxOptimizer) -> list[Tensor]:
    """Return the parameters of all groups, frozen ones too: their gradients are also cleared before an evaluation."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def asks_for_state(optimizer: ProxOptimizer) -> bool:
    """Whether a step without a closure is that of distributed checkpoints: lr = 0 and zero gradients."""
    gradients = [gradient_of(p) for p in all_params(optimizer) if p.grad is not None]
    return bool(gradients) and square(gradients) == 0 and all(float(g["lr"]) == 0 for g in optimizer.param_groups)


def require_gradients(params: list[Tensor], name: str = "closure") -> None:
    """Raise if no parameter got a gradient: the closure did not call ``backward``, or on something else."""
    if not any(p.grad is not None for p in params):
        raise RuntimeError(f"{name} must call backward, got no gradient for any parameter of the optimizer")


def gradient_of(p: Tensor) -> Tensor:
    """Return ``p.grad``, which must be there, with the placements of the parameter."""
    assert p.grad is not None
    return shards.placed_like(p.grad, p)
