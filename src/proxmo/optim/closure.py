"""The base of the methods whose step evaluates the loss itself, at more than one point."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from proxmo.optim.base import ProxOptimizer
from proxmo.secants import square


class ClosureOptimizer(ProxOptimizer):
    """A `ProxOptimizer` that needs a closure in each step."""

    @abstractmethod
    def _buffers(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, made if there is none; always with the same keys."""

    def _trained(self) -> list[Tensor]:
        """All parameters that a closure may give a gradient."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _note(self, **values: Any) -> None:
        """Write numbers that belong to the whole optimizer, and into its checkpoints, into all groups."""
        for group in self.param_groups:
            group.update(values)

    def _step_without_closure(self) -> None:
        """Distributed checkpoints ask for the state by a step without a closure and with zero gradients."""
        params = [p for p in self._trained() if p.grad is not None]
        if not params or square([gradient_of(p) for p in params]) != 0:
            raise TypeError(f"{type(self).__name__}.step needs a closure that evaluates the loss on a sample, got None")
        for p in params:
            self._buffers(p)


def gradient_of(p: Tensor) -> Tensor:
    """``p.grad``, which is known to be there."""
    assert p.grad is not None
    return p.grad
