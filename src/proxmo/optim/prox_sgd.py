"""Stochastic proximal gradient descent with Polyak momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo.kernels import Moves
from proxmo.kernels.moves import in_cache
from proxmo.optim.fused import check_fused, take_fused_steps
from proxmo.optim.momentum import Initial, PolyakMomentum
from proxmo.optim.options import Group, Options
from proxmo.optim.proximal_step import proximal_step
from proxmo.penalties.base import Penalty

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ProxSGD(PolyakMomentum):
    r"""Stochastic proximal gradient with Polyak momentum: minimises f(x) + ψ(x) from noisy gradients g of f.

    .. math::
        m_k = \mu\,m_{k-1} + (1 - \mu)\,g_k, \qquad
        x_{k+1} = \operatorname{prox}_{\mathrm{lr}\cdot\psi}(x_k - \mathrm{lr}\cdot m_k)

    Momentum is an average of gradients (torch's SGD with ``dampening=momentum``), not SGD's heavy ball: more momentum
    does not lengthen the step. With momentum close enough to 1, the method gets as close to a stationary point as you
    like at any batch size. The vanilla method (``momentum=0``) stalls at the noise level, whatever its lr. In the
    notation of Gao, Rodomanov and Stich (Algorithm 1), lr = 1/M and momentum = 1 − γ.

    Choose lr and momentum together:

    - Start with ten times the lr of torch's SGD with momentum 0.9, because the average does not multiply the step by
      1/(1 − momentum).
    - If you raise momentum, lower lr. The average lags by 1/(1 − momentum) steps, and the point must not move far in
      that time: keep lr·L well below 1 − momentum, with L the smoothness of f.
    - Anneal both, with `CosineRates` and `RateScheduler`. If only lr falls, the average keeps its noise, which keeps
      weights away from zero.

    Every option can be set per parameter group; ``penalty=None`` is plain SGD. The prox uses ``lr`` as its step, so a
    learning-rate scheduler scales gradient and penalty alike.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size, a number or a tensor of one element.
        momentum: μ in [0, 1), the weight of the past, a number or a tensor of one element; 0 keeps no buffer.
        penalty: ψ, or ``None`` for ψ = 0.
        initial: how the average starts: ``"gradient"`` with the first gradient, m₀ = g₀; ``"zero"`` with m₀ = 0, so
            that the first gradient is not used. Use ``"zero"`` without a penalty, if the noise of the gradients is
            much larger than their mean.
        fused: compute average, gradient step and prox in one pass over memory, in compiled loops (``pip install
            'proxmo[fast]'``). Applies to float32 and float64 on a CPU, and penalties that are elementwise or have
            groups along the first axis; all else takes the eager path.
        momentum_dtype: the dtype of the average; ``None`` uses that of the gradients. A bfloat16 average no longer
            follows its gradients if 1 − momentum is below 2⁻¹², so use ``torch.float32`` for momentum above 0.9995.
        options: ``maximize``, ``foreach`` and ``nonfinite``, as for every `ProxOptimizer`.

    >>> import torch, proxmo
    >>> x = torch.tensor([3.0, 0.2], requires_grad=True)
    >>> optimizer = proxmo.ProxSGD([x], lr=0.5, momentum=0.9, penalty=proxmo.L1(1.0))
    >>> for _ in range(300):
    ...     optimizer.zero_grad()
    ...     (x - torch.tensor([3.0, 0.2])).square().sum().div(2).backward()
    ...     optimizer.step()
    >>> x.detach()
    tensor([2.0000, 0.0000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float | Tensor = 0.9,
        penalty: Penalty | None = None,
        *,
        initial: Initial = "gradient",
        fused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "penalty": penalty, "initial": initial}
        super().__init__(params, {**own, "fused": fused, "momentum_dtype": momentum_dtype}, **options)

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        check_fused(group)

    def _step_group(self, group: Group, params: list[Tensor]) -> None:
        moves, certificates = self._moves(group, params), self._certificates_to_keep(group)
        if group["fused"] and certificates is None and not torch.compiler.is_compiling():
            moves = take_fused_steps(group, moves)
        for some in self._batches(group, moves) if certificates is None else [moves]:
            if some.params:
                proximal_step(group, some.params, self._averaged(group, some), certificates)

    def _batches(self, group: Group, moves: Moves) -> Iterable[Moves]:
        """Cut the moves into batches that stay in cache from the average to the prox."""
        penalty: Penalty | None = group["penalty"]
        together = group["foreach"] or group["units"] is not None or (penalty is not None and penalty.joint)
        if together or torch.compiler.is_compiling():
            return [moves]
        return in_cache(moves, lambda p: penalty is None or penalty.acts_on_rows(p))
