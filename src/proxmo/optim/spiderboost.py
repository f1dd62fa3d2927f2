"""SpiderBoost with a prox: a recursive estimate that starts anew from a large batch every so often."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from proxmo import checks
from proxmo.optim.evaluation import Closure, Sample
from proxmo.optim.options import Group, Options
from proxmo.optim.recursive import RecursiveOptimizer
from proxmo.penalties.base import Penalty


class ProxSpiderBoost(RecursiveOptimizer):
    r"""Proximal SpiderBoost: a large batch every ``period`` steps, and differences of gradients in between.

    .. math::
        v_k = \begin{cases} ∇f(x_k; \text{large batch}) & k \bmod \mathrm{period} = 0 \\
        v_{k-1} + ∇f(x_k; ξ_k) - ∇f(x_{k-1}; ξ_k) & \text{otherwise} \end{cases} \qquad
        x_{k+1} = \operatorname{prox}_{\mathrm{lr}\cdot\psi}(x_k - \mathrm{lr}\cdot v_k)

    For n samples, the theory prescribes lr = 1/(2L), and period and small batch √n (Wang, Ji, Zhou, Liang and Tarokh,
    2019; `theory.spiderboost_plan`). ``param_groups[0]["steps"]`` counts the steps and is saved, so a run that is
    resumed within a period continues it. A parameter that gets its first gradient within a period starts from the small
    batch.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size, a number or a tensor of one element.
        period: the number of steps from one large batch to the next, ≥ 1; the same in all groups.
        penalty: ψ, or ``None`` for ψ = 0.
        options: as for every `ProxOptimizer`; ``nonfinite`` also checks the gradient at the previous point.

    >>> import torch, proxmo
    >>> x = torch.zeros(2, requires_grad=True)
    >>> optimizer = proxmo.ProxSpiderBoost([x], lr=0.3, period=10, penalty=proxmo.L1(1.0))
    >>> data = torch.tensor([3.0, 0.2]) + torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    >>> def closure_of(batch):
    ...     def closure():
    ...         loss = (x - batch).square().sum() / (2 * len(batch))
    ...         loss.backward()
    ...         return loss.item()
    ...     return closure
    >>> for _ in range(50):
    ...     _ = optimizer.step(closure_of(data[torch.randint(100, (10,))]), closure_of(data))
    >>> x[1].item(), abs(x[0].item() - (data[:, 0].mean() - 1)) < 1e-5
    (0.0, tensor(True))
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        period: int = 100,
        penalty: Penalty | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "period": period, "penalty": penalty, "steps": 0}, **options)

    @property
    def large_batch_is_due(self) -> bool:
        """Whether the next step begins a period."""
        group = self.param_groups[0]
        return bool(group["steps"] % group["period"] == 0)

    @torch.no_grad()
    def step(self, closure: Closure | None = None, large: Closure | None = None) -> float | None:  # type: ignore[override]
        """Take a step from the large batch if it is due, otherwise from ``closure`` at the current and previous point.

        Args:
            closure: evaluates the loss on a small batch, as for `ProxSTORM`.
            large: the same for the large batch or all data; called alone, once, at the first step of each period. If
                not given, ``closure`` must be the large one whenever `large_batch_is_due`.
        """
        begins = closure is not None and large is not None and self.large_batch_is_due
        return self._step_on(large if begins else closure)

    def _look_back(self, sample: Sample) -> dict[Tensor, Tensor]:
        return {} if self.large_batch_is_due else super()._look_back(sample)

    def _advance(self, old: Mapping[Tensor, Tensor], plain: Mapping[Tensor, Tensor]) -> None:
        super()._advance(old, plain)
        steps = self.param_groups[0]["steps"] + 1
        for group in self.param_groups:
            group["steps"] = steps

    def _check_groups(self) -> None:
        super()._check_groups()
        periods = {group["period"] for group in self.param_groups}
        if len(periods) > 1:
            raise ValueError(f"period must be the same in all parameter groups, got {sorted(periods)}")

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        checks.count("period", group["period"], least=1)
