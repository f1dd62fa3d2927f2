"""Variance reduction along the path: a gradient estimate, updated by the gradients of one sample at two points.

If v estimates ∇f(x_{k−1}), then v + ∇f(x_k; ξ) − ∇f(x_{k−1}; ξ) estimates ∇f(x_k), and the noise that it adds is
proportional to the move, since both gradients are of one sample ξ. `ProxSpiderBoost`, `ProxHybridSGD` and `ProxSTORM`
differ in how they keep these errors from adding up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from proxmo import checks, shards
from proxmo.optim.base import use_foreach
from proxmo.optim.closure import ClosureOptimizer, all_params, gradient_of, require_gradients
from proxmo.optim.evaluation import Closure, Sample
from proxmo.optim.options import Group

Update: TypeAlias = Callable[[Group, list[Tensor], list[Tensor]], object]
"""(group, params, old) updates the estimates to x_k: ``old`` are ∇f(x_{k−1}; ξ), and ``.grad`` is ∇f(x_k; ξ)."""


class RecursiveOptimizer(ClosureOptimizer):
    """The base of the two-point methods: keeps the estimate v and the previous point, and moves along v.

    A step first calls `_sample` and `_look_back`, which evaluate closures and may raise, and only then `_advance`,
    which writes the state and moves. A parameter without a gradient in the previous step restarts its estimate.
    Estimates have the dtype of the parameters; in bfloat16 the differences of gradients are mostly rounding.
    """

    state_keys = frozenset({"step", "estimate", "previous"})

    def _sample(self, closure: Closure) -> Sample:
        """Evaluate the closure at x_k and check the gradients."""
        sample = Sample("closure", closure, all_params(self))
        self._check_step()
        require_gradients(all_params(self))
        return sample

    def _look_back(self, sample: Sample) -> dict[Tensor, Tensor]:
        """Return ∇f(x_{k−1}; ξ) for the parameters that have an estimate."""
        params = all_params(self)
        started = list(map(self._started, params))
        if not any(started):
            return {}
        points = [self.state[p]["previous"] if known else p for p, known in zip(params, started, strict=True)]
        gradients = sample.gradients_at(points)
        return {
            p: torch.zeros_like(p) if gradient is None else gradient
            for p, gradient, known in zip(params, gradients, started, strict=True)
            if known
        }

    def _advance(self, old: dict[Tensor, Tensor], update: Update) -> None:
        """Update the estimates to x_k, or start them with the gradient, and move to x_{k+1}."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if p not in old:
                    self._buffers(p)["estimate"].copy_(gradient_of(p))
            known = [p for p in params if p in old]
            if known:
                update(group, known, [old[p] for p in known])
            for p in params:
                self.state[p]["step"] += 1
        for p, state in self.state.items():
            state["previous"].copy_(p)
            if p.grad is None:  # its estimate is out of date: it restarts with the next gradient
                state["step"].zero_()
        self._take_step()

    def _started(self, p: Tensor) -> bool:
        """Whether there is an estimate of the gradient at the previous point."""
        return p in self.state and bool(self.state[p]["step"] > 0)

    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        return [self.state[p]["estimate"] for p in params]

    def _buffers(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), estimate=torch.zeros_like(p), previous=p.detach().clone())
        return state

    def _carry(self, group: Group, params: list[Tensor], old: list[Tensor], weight: float = 1.0) -> list[Tensor]:
        """Set v ← weight·(v − ∇f(x_{k−1}; ξ)) + ∇f(x_k; ξ), which all methods share; return the estimates."""
        estimates = [self.state[p]["estimate"] for p in params]
        parts = list(map(shards.local, estimates))
        old = [shards.local(shards.placed_like(before, p)) for before, p in zip(old, params, strict=True)]
        new = [shards.local(gradient_of(p)) for p in params]
        if use_foreach(group["foreach"], parts):
            torch._foreach_sub_(parts, old)
            if weight != 1:
                torch._foreach_mul_(parts, weight)
            torch._foreach_add_(parts, new)
        else:
            for estimate, before, now in zip(parts, old, new, strict=True):
                estimate.sub_(before).mul_(weight).add_(now)
        return estimates


def check_weight(name: str, group: Group) -> None:
    """Raise if an option is not a number in [0, 1]."""
    takes = "a number in [0, 1]"
    if not 0 <= checks.number(name, group[name], takes=takes) <= 1:
        raise ValueError(f"{name} must be {takes}, got {group[name]!r}")
