"""Hybrid SGD with a prox: a recursive estimate, kept from drifting by plain gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from proxmo.optim.evaluation import Closure
from proxmo.optim.options import Group, Options
from proxmo.optim.recursive import RecursiveOptimizer
from proxmo.penalties.base import Penalty


class ProxHybridSGD(RecursiveOptimizer):
    r"""Proximal hybrid SGD: mixes a recursive estimate with a plain gradient, and averages the step.

    .. math::
        v_k &= β\,(v_{k-1} + ∇f(x_k; ξ_k) - ∇f(x_{k-1}; ξ_k)) + (1 - β)\,∇f(x_k; ζ_k) \\
        x_{k+1} &= (1 - γ)\,x_k + γ\operatorname{prox}_{\mathrm{lr}\cdot\psi}(x_k - \mathrm{lr}\cdot v_k)

    ξ_k and ζ_k are independent samples, so a step takes two samples and three gradients. In the notation of ProxHSGD
    (Tran-Dinh, Pham, Phan and Nguyen, 2022) momentum = β and averaging = γ; `theory.hybrid_plan` has values for them.
    The first step takes v₀ from its closure alone: use a large batch there.

    With ``averaging < 1``, a weight that the prox sets to zero only moves closer to zero. For exact zeros, use
    ``averaging=1``, at least in the last step.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size, a number or a tensor of one element.
        momentum: β in [0, 1], the weight of the recursive estimate.
        averaging: γ in [0, 1], how far to go towards the point that the prox gives.
        penalty: ψ, or ``None`` for ψ = 0.
        options: as for every `ProxOptimizer`; ``nonfinite`` also checks the gradient at the previous point.

    >>> import torch, proxmo
    >>> x = torch.zeros(2, requires_grad=True)
    >>> optimizer = proxmo.ProxHybridSGD([x], lr=0.1, momentum=0.9, penalty=proxmo.L1(1.0))
    >>> _ = torch.manual_seed(0)
    >>> def closure_of(sample):
    ...     def closure():
    ...         loss = (x - sample).square().sum() / 2
    ...         loss.backward()
    ...         return loss.item()
    ...     return closure
    >>> for _ in range(500):
    ...     one, other = torch.tensor([3.0, 0.2]) + 0.5 * torch.randn(2, 2)
    ...     _ = optimizer.step(closure_of(one), closure_of(other))
    >>> x[1].item(), abs(x[0].item() - 2) < 0.3
    (0.0, True)
    """

    weights = ("momentum", "averaging")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        averaging: float = 1.0,
        penalty: Penalty | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "averaging": averaging, "penalty": penalty}
        super().__init__(params, own, **options)

    @torch.no_grad()
    def step(self, closure: Closure | None = None, other: Closure | None = None) -> float | None:  # type: ignore[override]
        """Evaluate ``closure`` at the current and the previous point and ``other`` at the current one, and take a step.

        Args:
            closure: evaluates the loss on the sample ξ, as for `ProxSTORM`; ``.grad`` keeps its gradient at the
                current point.
            other: the same for an independent sample ζ. Not called in the first step.
        """
        if closure is not None and other is None:
            raise TypeError(
                "ProxHybridSGD.step needs a second closure, other, that evaluates the loss on an independent sample, "
                "got None; with one sample ProxSTORM does the same"
            )
        return self._step_on(closure, other)

    def _update(self, group: Group, p: Tensor, old: Tensor, plain: Tensor | None) -> None:
        super()._update(group, p, old, plain)
        assert plain is not None
        self.state[p]["estimate"].lerp_(plain, 1 - group["momentum"])

    def _take_step(self) -> None:
        super()._take_step()
        for group in self.param_groups:
            if group["averaging"] != 1:
                for p in group["params"]:
                    if p.grad is not None:
                        p.lerp_(self.state[p]["previous"], 1 - group["averaging"])
