"""STORM with a prox: momentum that is corrected for the move it is carried over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo.optim.evaluation import Closure
from proxmo.optim.options import Group, Options
from proxmo.optim.recursive import RecursiveOptimizer, check_weight
from proxmo.penalties.base import Penalty

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ProxSTORM(RecursiveOptimizer):
    r"""Proximal STORM: momentum whose past is moved along, by the gradient of one sample at two points.

    .. math::
        d_k = ∇f(x_k; ξ_k) + μ\,(d_{k-1} - ∇f(x_{k-1}; ξ_k)), \qquad
        x_{k+1} = \operatorname{prox}_{\mathrm{lr}\cdot\psi}(x_k - \mathrm{lr}\cdot d_k)

    One sample and two gradients per step, no large batch. In the notation of PStorm (Xu and Xu, 2023) lr = α_k and
    momentum = 1 − β_k; `theory.StormSchedule` has their values, for `RateScheduler`. With ``momentum=0`` it is vanilla
    proximal SGD, with ``momentum=1`` the SARAH recursion without restarts.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size, a number or a tensor of one element.
        momentum: μ in [0, 1], the weight of the past.
        penalty: ψ, or ``None`` for ψ = 0.
        options: ``maximize``, ``foreach`` and ``nonfinite``, as for every `ProxOptimizer`; the last also looks at the
            gradient at the point before.

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

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        penalty: Penalty | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "penalty": penalty}, **options)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Evaluate the closure here and at the point before, and take a step.

        If the closure raises, at either point, parameters and state are as they were. The second evaluation leaves no
        trace in running statistics or random numbers, and ``.grad`` keeps the gradient at this point.

        Args:
            closure: evaluates the loss on one sample at the parameters as they are, calls ``backward`` and returns the
                loss. It is called twice and must use the same data both times.
        """
        if closure is None:
            self._step_without_closure()
            return None
        self._check_groups()
        sample = self._sample(closure)
        old = self._look_back(sample)
        if self._admits_gradients(old):
            self._advance(old, self._update)
        loss: float = sample.loss
        return loss

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        check_weight("momentum", group)

    def _update(self, group: Group, params: list[Tensor], old: list[Tensor]) -> None:
        self._carry(group, params, old, weight=group["momentum"])
