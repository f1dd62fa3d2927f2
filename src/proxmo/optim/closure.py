"""The base of methods whose step evaluates the loss itself, at more than one point."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from proxmo import shards
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.options import Group
from proxmo.secants import square


class ClosureOptimizer(ProxOptimizer):
    """A `ProxOptimizer` that needs a closure in each step."""

    @abstractmethod
    def _buffers(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, created if there is none; always with the same keys."""

    def _note(self, **values: Any) -> None:
        """Write numbers of the whole optimizer into all groups, so that checkpoints have them."""
        for group in self.param_groups:
            group.update(values)

    def _step_without_closure(self) -> None:
        if not asks_for_state(self):
            raise TypeError(f"{type(self).__name__}.step needs a closure that evaluates the loss on a sample, got None")
        for p in all_params(self):
            if p.grad is not None:
                self._buffers(p)


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


def refuse_nonfinite(name: str, group: Group) -> None:
    """Raise if the option ``nonfinite`` is set for a method that always raises."""
    if group["nonfinite"] != "propagate":
        raise ValueError(f"nonfinite is not an option of {name}, which always raises, got {group['nonfinite']!r}")
