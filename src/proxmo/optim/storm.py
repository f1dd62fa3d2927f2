"""STORM with a prox: momentum that is corrected for the move it is carried over."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from proxmo.optim.closure import gradient_of
from proxmo.optim.options import Group, Options
from proxmo.optim.recursive import RecursiveOptimizer
from proxmo.penalties.base import Penalty


class ProxSTORM(RecursiveOptimizer):
    r"""Proximal STORM: momentum that is corrected for each move, with the gradient of one sample at two points.

    .. math::
        d_k = ∇f(x_k; ξ_k) + μ\,(d_{k-1} - ∇f(x_{k-1}; ξ_k)), \qquad
        x_{k+1} = \operatorname{prox}_{\mathrm{lr}\cdot\psi}(x_k - \mathrm{lr}\cdot d_k)

    A step takes one sample and two gradients, and no large batch. In the notation of PStorm (Xu and Xu, 2023) lr = α_k
    and momentum = 1 − β_k; `theory.StormSchedule` has their values, for `RateScheduler`. With ``momentum=0`` it is
    vanilla proximal SGD, with ``momentum=1`` the SARAH recursion without restarts.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size, a number or a tensor of one element.
        momentum: μ in [0, 1], the weight of the past.
        penalty: ψ, or ``None`` for ψ = 0.
        options: as for every `ProxOptimizer`; ``nonfinite`` also checks the gradient at the previous point.

    >>> import torch, proxmo
    >>> x = torch.zeros(2, requires_grad=True)
    >>> optimizer = proxmo.ProxSTORM([x], lr=0.1, momentum=0.9, penalty=proxmo.L1(1.0))
    >>> _ = torch.manual_seed(0)
    >>> for _ in range(500):
    ...     sample = torch.tensor([3.0, 0.2]) + 0.5 * torch.randn(2)  # kept while the closure is called
    ...     def closure():
    ...         loss = (x - sample).square().sum() / 2
    ...         loss.backward()
    ...         return loss.item()
    ...     _ = optimizer.step(closure)
    >>> x[1].item(), abs(x[0].item() - 2) < 0.3
    (0.0, True)
    """

    weights = ("momentum",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        penalty: Penalty | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "penalty": penalty}, **options)

    def _update(self, group: Group, p: Tensor, old: Tensor, plain: Tensor | None) -> None:
        self.state[p]["estimate"].sub_(old).mul_(group["momentum"]).add_(gradient_of(p))
