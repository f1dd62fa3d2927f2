"""ProxSGD with a step size and a momentum that tune themselves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo import shards
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.checkpoints import restore_precision
from proxmo.optim.closure import all_params, gradient_of
from proxmo.optim.options import Group, Options
from proxmo.optim.proximal_step import is_zero
from proxmo.penalties.base import Penalty, widen
from proxmo.secants import distance, square

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The exponent of γ_k: a larger one averages longer, until the average lags; k^(-1/2) measured up to twice the error.
AVERAGING = 2 / 3
# The first move, relative to ‖x₀‖: far below the distance to go, and soon outgrown, as r̄ grows with each move. A
# hundredth of it costs a deep network most of an epoch.
FIRST_MOVE = 1e-2
# Steps to the first look at the distance from the anchor: with fewer, a distance is that of a few noisy moves.
FIRST_LOOK = 20
# ‖x − anchor‖² grows like t² on a straight path, t in diffusion and t⁰ where noise keeps the iterates; this exponent is
# near the last, since cutting lr too early costs more than cutting it late.
STALL = 0.3
# The numbers of the whole run, kept in every parameter group so that checkpoints have them.
RUN: Group = {
    "steps": 0,
    "gradient_squares": 0.0,
    "distance": 0.0,
    "cut": 1.0,
    "anchor_step": 0,
    "travelled": 0.0,
    "tuned_lr": 0.0,
}


class AutoProxSGD(ProxOptimizer):
    r"""`ProxSGD` that sets lr and momentum itself: lr follows from distances and gradients, and is halved on a stall.

    .. math::
        m_k = (1 - γ_k)\,m_{k-1} + γ_k\,g_k, \quad γ_k = k^{-2/3}, \qquad
        x_{k+1} = \operatorname{prox}_{η_kψ}(x_k - η_k m_k), \quad
        η_k = \mathrm{lr}\cdot c_k\,\frac{\max_{i\le k}\|x_i - x_0\|}{\sqrt{\sum_{i\le k}\|g_i\|^2}}

    The distance over the gradients (DoG; Ivgi, Hinder and Carmon, 2023) finds the scale of the problem, starting from a
    hundredth of ‖x₀‖ (of 1 if x₀ = 0). The factor c starts at 1. It is halved when the iterates stop travelling, that
    is, when the distance from the point of the last halving hardly grows while the time since then doubles (Pesme,
    Dieuleveut and Flammarion, 2020). It stays above 1/(2k). Multiplying f and ψ by a number changes nothing, nor does
    the unit of x if x₀ ≠ 0. All parameter groups share these numbers; ``param_groups[0]["tuned_lr"]`` is the last
    η_k/lr.

    ``lr`` is a factor on the tuned step size, 1 by default. It may differ between parameter groups, and a scheduler
    scales the step size, including that of the prox, through it. There is no ``momentum`` to set or to schedule.

    This is a heuristic without a proof; `docs/theory.md` has the measurements. Do not use it

    - if the first gradients, or rare ones, are a hundred times larger than the others: all gradients count, so lr stays
      small for a long time. Clip them, for example with ``torch.nn.utils.clip_grad_norm_``.
    - in runs of a few hundred steps from untrained weights: `ProxSGD` with `CosineRates` and a tuned lr is better
      there. An annealing schedule makes it worse, because it lowers lr before the scale is found.
    - if the problem changes during the run: lr hardly grows again once the scale is found.
    - if x₀ = 0 and the scale of the solution is far from 1: with a factor of 10⁴, errors were up to 17 times as large
      after 2,000 steps, with 10⁶ 33 times. Start from a non-zero point, or choose another unit.
    - for bfloat16 weights, because moves smaller than their rounding are lost.

    A gradient with NaN or inf spoils all parameters, not only its own: see ``nonfinite``.

    The state has two copies of the parameters (x₀, and the point of the last halving) and the average, which is in
    float32 for half-precision parameters. Each parameter counts its own gradients for the k of its average.

    Args:
        params: parameters, named parameters or parameter groups.
        penalty: ψ, or ``None`` for ψ = 0.
        lr: the factor on the tuned step size, a number or a tensor of one element.
        options: ``maximize``, ``foreach`` and ``nonfinite``, as for every `ProxOptimizer`.

    >>> import torch, proxmo
    >>> x = torch.zeros(2, requires_grad=True)
    >>> optimizer = proxmo.AutoProxSGD([x], penalty=proxmo.L1(1.0))
    >>> noise = torch.Generator().manual_seed(0)
    >>> for _ in range(2000):
    ...     optimizer.zero_grad()
    ...     sample = torch.tensor([3.0, 0.2]) + torch.randn(2, generator=noise)
    ...     (x - sample).square().sum().div(2).backward()
    ...     optimizer.step()
    >>> (x.detach() - torch.tensor([2.0, 0.0])).abs().max() < 0.1
    tensor(True)
    """

    state_keys = frozenset({"step", "momentum_buffer", "start", "anchor"})

    def __init__(
        self, params: ParamsT, penalty: Penalty | None = None, *, lr: float | Tensor = 1.0, **options: Unpack[Options]
    ) -> None:
        super().__init__(params, {"lr": lr, "penalty": penalty, **RUN}, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if any("gradient_squares" not in group for group in state["param_groups"]):
            raise ValueError("cannot load the checkpoint of another optimizer into AutoProxSGD: it lacks the distances")
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; averages stay in float32 where torch would cast them to half-precision parameters."""
        super().load_state_dict(state_dict)
        restore_precision(self, state_dict, "momentum_buffer")

    def _take_step(self) -> None:
        params = [p for p in all_params(self) if p.grad is not None]
        for p in params:
            self._start(p)
        squares = square([gradient_of(p) for p in params])
        known = self.param_groups[0]["gradient_squares"] > 0
        # Zero gradients tell nothing before the first other one. With lr = 0, they are the step by which a distributed
        # checkpoint asks for the state.
        if squares == 0 and not (known and params and any(not is_zero(group["lr"]) for group in self.param_groups)):
            return
        self._tune(squares)
        super()._take_step()

    def _start(self, p: Tensor) -> None:
        """Give a parameter its state; before its first step, note where it is, which may have changed since."""
        state = self.state[p]
        if not state:
            average = torch.zeros_like(widen(p.detach()))
            state.update(step=torch.zeros(()), momentum_buffer=average, start=p.clone(), anchor=p.clone())
        elif state["step"] == 0:
            state["start"].copy_(p)
            state["anchor"].copy_(p)

    def _tune(self, squares: float) -> None:
        """Set the step size from the distances and all gradients up to this one."""
        run = {name: self.param_groups[0][name] for name in RUN}
        params = [p for p in all_params(self) if self.state.get(p)]
        if run["steps"] == 0:
            run["distance"] = FIRST_MOVE * (math.sqrt(square(params)) or 1.0)
        run["distance"] = max(run["distance"], self._distance_from("start", params))
        run["gradient_squares"] += squares
        if self._stalls(run, params) and run["cut"] * run["steps"] > 1:
            run["cut"] /= 2
            run["anchor_step"] = run["steps"]
            for p in params:
                self.state[p]["anchor"].copy_(p)
        run["steps"] += 1
        run["tuned_lr"] = run["cut"] * run["distance"] / math.sqrt(run["gradient_squares"])
        for group in self.param_groups:
            group.update(run)

    def _stalls(self, run: Group, params: list[Tensor]) -> bool:
        """Look at the distance from the anchor, if the time since then has doubled, and compare it with the last."""
        looks, rest = divmod(run["steps"] - run["anchor_step"], FIRST_LOOK)
        if rest or looks == 0 or looks & (looks - 1):  # not 1, 2, 4, 8, … times the first look
            return False
        before, run["travelled"] = run["travelled"], self._distance_from("anchor", params)
        return bool(looks > 1 and run["travelled"] < 2 ** (STALL / 2) * before)

    def _distance_from(self, point: str, params: list[Tensor]) -> float:
        return distance(params, [self.state[p][point] for p in params])

    def prox_steps(self, group: Group, params: list[Tensor]) -> float:
        return float(group["lr"]) * float(group["tuned_lr"])

    def _step_group(self, group: Group, params: list[Tensor]) -> None:
        super()._step_group({**group, "lr": group["lr"] * group["tuned_lr"]}, params)

    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        for p in params:
            state = self.state[p]
            state["step"] += 1
            average = shards.local(state["momentum_buffer"])
            average.lerp_(shards.local(gradient_of(p)).to(average.dtype), float(state["step"]) ** -AVERAGING)
        return [self.state[p]["momentum_buffer"] for p in params]
