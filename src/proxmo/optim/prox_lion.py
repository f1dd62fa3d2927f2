"""Lion, the sign method with one buffer, for f(x) + ψ(x)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo import checks, shards
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.checkpoints import restore_precision
from proxmo.optim.options import Group, Options, check_betas
from proxmo.optim.proximal_step import as_scalar
from proxmo.penalties.base import Penalty, widen
from proxmo.penalties.thresholds import widest

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The prox of ψ with a step this long finds the minimum of ⟨m, u⟩ + ψ(u): nothing is left of the distance to x.
FAR = 1e30


class ProxLion(ProxOptimizer):
    r"""Lion for f(x) + ψ(x): every weight moves by at most lr, to where the linear model of f plus ψ is smallest.

    .. math::
        c_k = β_1 m_{k-1} + (1 - β_1)\,g_k, \qquad
        x_{k+1} = \operatorname{argmin}_{\|u - y\|_\infty \le \mathrm{lr}} \langle c_k, u\rangle + ψ(u), \qquad
        m_k = β_2 m_{k-1} + (1 - β_2)\,g_k

    with y = (1 − lr·weight_decay)·x_k. Without a penalty this is Lion (Chen et al., 2023): y − lr·sign(c). With `L1`,
    weights whose averaged gradient is below the strength move towards zero by lr per step and stay exactly there; the
    others follow the sign. The state is one buffer, half of Adam's.

    Use a tenth to a third of your AdamW lr, and let it fall to zero: a sign step has constant length, so weights that
    do not vanish end within lr of the solution.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the length of a step along each axis, a number or a tensor of one element.
        betas: β₁ and β₂ in [0, 1), the weights of the past in the step and in the buffer.
        weight_decay: as in AdamW, weights are multiplied by 1 − lr·weight_decay.
        penalty: ψ: a convex sum over elements such as `L1` or `ElasticNet`, a `Box`, or ``None`` for ψ = 0. Weights
            that start outside a box move into it.
        options: ``maximize`` and ``nonfinite``, as for every `ProxOptimizer`; ``foreach`` changes nothing.

    A step leaves no `Certificate`. The buffer is in float32 for half-precision parameters.

    >>> import torch, proxmo
    >>> x = torch.tensor([1.0, 0.2], requires_grad=True)
    >>> optimizer = proxmo.ProxLion([x], lr=0.25, penalty=proxmo.L1(0.5))
    >>> x.grad = torch.tensor([-9.0, 1.0])  # the first average is a tenth of it
    >>> optimizer.step()
    >>> x.detach()
    tensor([1.2500, 0.0000])
    """

    state_keys = frozenset({"exp_avg"})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        penalty: Penalty | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "penalty": penalty}
        super().__init__(params, own, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; buffers stay in float32 where torch would cast them to half-precision parameters."""
        super().load_state_dict(state_dict)
        restore_precision(self, state_dict, "exp_avg")

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        check_betas(group["betas"])
        checks.nonnegative("weight_decay", group["weight_decay"])
        penalty = group["penalty"]
        if penalty is not None and not (penalty.separable and penalty.convex):
            raise ValueError(f"penalty of ProxLion must be convex and a sum over elements, such as L1, got {penalty}")

    def _step_group(self, group: Group, params: list[Tensor]) -> None:
        lr = as_scalar(group["lr"])
        for p, direction in zip(params, self._directions(group, params), strict=True):
            local = shards.local(p)
            point = widen(local) * (1 - lr * group["weight_decay"])
            local.copy_(_best_within(point, direction, lr, group["penalty"]))
        shards.mark_written(params)

    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """Return what the step follows, and average the gradients into the buffers, all of local shards."""
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(widen(p.detach()))
        gradients = [widen(shards.local(shards.placed_like(p.grad, p))) for p in params if p.grad is not None]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        averages = [shards.local(self.state[p]["exp_avg"]) for p in params]
        beta1, beta2 = group["betas"]
        directions = list(torch._foreach_lerp(averages, gradients, 1 - beta1))
        torch._foreach_lerp_(averages, gradients, 1 - beta2)
        return directions


def _best_within(point: Tensor, direction: Tensor, lr: float | Tensor, penalty: Penalty | None) -> Tensor:
    """Return the minimiser of ⟨direction, u⟩ + ψ(u) among the u that differ from ``point`` by at most lr anywhere.

    In one dimension it is the nearest to the minimiser over all u, which the prox finds with a step without end.
    """
    best = widest(point) - FAR * widest(direction)
    if penalty is not None:
        penalty.prox_([best], FAR)
    return torch.clamp(best, point - lr, point + lr).to(point.dtype).add_(0.0)  # which makes -0.0 to 0.0
