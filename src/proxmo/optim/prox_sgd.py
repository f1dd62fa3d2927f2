"""Stochastic proximal gradient descent with Polyak momentum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo.kernels.moves import Moves
from proxmo.optim.base import Certificate, Group, Nonfinite, proximal_step
from proxmo.optim.fused import check_fused, take_fused_steps
from proxmo.optim.large import large_and_others, take_large_steps
from proxmo.optim.momentum import Initial, PolyakMomentum
from proxmo.penalties.base import Penalty


class ProxSGD(PolyakMomentum):
    r"""Stochastic proximal gradient with Polyak momentum: minimises f(x) + ψ(x) from noisy gradients g of f.

    .. math::
        m_k = \mu\,m_{k-1} + (1 - \mu)\,g_k, \qquad
        x_{k+1} = \operatorname{prox}_{\mathrm{lr}\cdot\psi}(x_k - \mathrm{lr}\cdot m_k)

    Momentum is an average of gradients (torch's SGD with ``dampening=momentum``), not SGD's heavy ball: more of it does
    not lengthen the step. With momentum close enough to 1 the method gets as near to a stationary point as you like
    at any batch size, where the vanilla method (``momentum=0``) stalls at the level of the noise, whatever its lr. In
    the notation of Gao, Rodomanov and Stich (Algorithm 1) lr = 1/M and momentum = 1 − γ.

    Every option may be set per parameter group; ``penalty=None`` is plain SGD. The prox sees ``lr`` as its step, so a
    learning-rate scheduler scales gradient and penalty alike.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size, a number or a tensor of one element.
        momentum: μ in [0, 1), the weight of the past; 0 keeps no buffer.
        penalty: ψ, or ``None`` for ψ = 0.
        initial: how the average starts: ``"gradient"`` with the first gradient, m₀ = g₀; ``"zero"`` with m₀ = 0, so
            that the first gradient is not used. Zero suits gradients much noisier than long, without a penalty.
        maximize: maximise f(x) − ψ(x) instead.
        foreach: hand whole lists of tensors to torch's foreach kernels; ``None`` does so where they apply, though not
            with large tensors on a CPU.
        fused: average, gradient step and prox in one pass over memory, in compiled loops (``pip install
            'proxmo[fast]'``); for float32 and float64 on a CPU, and penalties that are elementwise or by groups along
            the first axis. What cannot be taken so is done the plain way.
        momentum_dtype: of the average; ``None`` takes that of the gradients. An average in bfloat16 does not follow
            its gradients any more where 1 − momentum is below 2⁻¹², so take ``torch.float32`` from 0.9995 on.
        nonfinite: what to do if a gradient has NaN or inf. ``"propagate"`` takes the step, as torch does; ``"raise"``
            raises a ``FloatingPointError``, ``"skip"`` does nothing; both before anything is changed.

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
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        penalty: Penalty | None = None,
        *,
        initial: Initial = "gradient",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
        nonfinite: Nonfinite = "propagate",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "penalty": penalty,
                "initial": initial,
                "maximize": maximize,
                "foreach": foreach,
                "fused": fused,
                "momentum_dtype": momentum_dtype,
                "nonfinite": nonfinite,
            },
        )

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        check_fused(group)

    def _step_group(self, group: Group, params: list[Tensor], certificates: dict[Tensor, Certificate] | None) -> None:
        moves = self._moves(group, params)
        large = Moves([], [], [])
        if certificates is None and not torch.compiler.is_compiling():
            if group["fused"]:
                moves = take_fused_steps(group, moves)
                if not moves.params:
                    return
            large, moves = large_and_others(group, moves)
        if moves.params:
            proximal_step(moves.params, self._averaged(group, moves), group, certificates)
        if large.params:
            take_large_steps(group, large)
