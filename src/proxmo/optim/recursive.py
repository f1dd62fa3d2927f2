"""Variance reduction along the path: a gradient estimate, updated by the gradients of one sample at two points.

If v estimates ∇f(x_{k−1}), then v + ∇f(x_k; ξ) − ∇f(x_{k−1}; ξ) estimates ∇f(x_k), and the noise that it adds is
proportional to the move, since both gradients are of one sample ξ. `ProxSpiderBoost`, `ProxHybridSGD` and `ProxSTORM`
differ in how they keep these errors from adding up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from proxmo import checks, shards
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.closure import all_params, asks_for_state, gradient_of, require_gradients
from proxmo.optim.evaluation import Closure, Sample, copies_of_gradients, evaluate
from proxmo.optim.options import Group


class RecursiveOptimizer(ProxOptimizer):
    """The base of the two-point methods: keeps the estimate v and the previous point, and moves along v.

    Subclasses extend `_update`. A parameter without a gradient in the previous step restarts its estimate. Estimates
    have the dtype of the parameters; in bfloat16 the differences of gradients are mostly rounding.
    """

    state_keys = frozenset({"step", "estimate", "previous"})
    weights: ClassVar[tuple[str, ...]] = ()
    """The options that are numbers in [0, 1]."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Evaluate the closure here and at the point before, and take a step.

        If the closure raises, at either point, parameters and state are as they were. The second evaluation leaves no
        trace in running statistics or random numbers, and ``.grad`` keeps the gradient at this point.

        Args:
            closure: evaluates the loss on one sample at the parameters as they are, calls ``backward`` and returns the
                loss. It is called twice and must use the same data both times.
        """
        return self._step_on(closure)

    def _step_on(self, closure: Closure | None, other: Closure | None = None) -> float | None:
        """Take a step on the sample of ``closure``; `_update` also gets the gradients of ``other`` at x_k."""
        params = all_params(self)
        if closure is None and not asks_for_state(self):
            raise TypeError(f"{type(self).__name__}.step needs a closure that evaluates the loss on a sample, got None")
        if closure is None:
            for p in params:
                if p.grad is not None:
                    self._buffers(p)
            return None
        self._check_groups()
        plain = {}
        if other is not None and any(map(self._started, params)):
            evaluate("other", other, params)
            require_gradients(params, "other")
            plain = {p: _gradient_or_zero(p, g) for p, g in zip(params, copies_of_gradients(params), strict=True)}
        sample = Sample("closure", closure, params)
        self._check_step()
        require_gradients(params)
        old = self._look_back(sample)
        if self._admits_gradients(old, plain):
            self._advance(old, plain)
        return sample.loss

    def _look_back(self, sample: Sample) -> dict[Tensor, Tensor]:
        """Return ∇f(x_{k−1}; ξ) for the parameters that have an estimate."""
        params = all_params(self)
        started = {p for p in params if self._started(p)}
        if not started:
            return {}
        gradients = sample.gradients_at([self.state[p]["previous"] if p in started else p for p in params])
        return {p: _gradient_or_zero(p, g) for p, g in zip(params, gradients, strict=True) if p in started}

    def _advance(self, old: Mapping[Tensor, Tensor], plain: Mapping[Tensor, Tensor]) -> None:
        """Update the estimates to x_k, or start them with the gradient, and move to x_{k+1}."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self._buffers(p)
                    if p in old:
                        self._update(group, p, old[p], plain.get(p))
                    else:
                        state["estimate"].copy_(gradient_of(p))
                    state["step"] += 1
        for p, state in self.state.items():
            state["previous"].copy_(p)
            if p.grad is None:  # its estimate is out of date: it restarts with the next gradient
                state["step"].zero_()
        self._take_step()

    def _update(self, group: Group, p: Tensor, old: Tensor, plain: Tensor | None) -> None:
        """Update the estimate to x_k: v ← v − ∇f(x_{k−1}; ξ) + ∇f(x_k; ξ)."""
        self.state[p]["estimate"].sub_(old).add_(gradient_of(p))

    def _started(self, p: Tensor) -> bool:
        """Whether there is an estimate of the gradient at the previous point."""
        return p in self.state and bool(self.state[p]["step"] > 0)

    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        return [self.state[p]["estimate"] for p in params]

    def _buffers(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, created if there is none."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), estimate=torch.zeros_like(p), previous=p.detach().clone())
        return state

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        takes = "a number in [0, 1]"
        for name in self.weights:
            if not 0 <= checks.number(name, group[name], takes=takes) <= 1:
                raise ValueError(f"{name} must be {takes}, got {group[name]!r}")


def _gradient_or_zero(p: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the gradient with the placements of the parameter, zeros if there is none."""
    return torch.zeros_like(p) if gradient is None else shards.placed_like(gradient, p)
