"""Schedulers for lr, momentum and the strength of penalties."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from proxmo import checks
from proxmo.optim.base import ProxOptimizer
from proxmo.penalties.base import Penalty
from proxmo.penalties.trimmed import Trimmed
from proxmo.theory import Rates

_WEIGHTS = ("strength", "l1", "l2", "group")  # the fields that multiply a penalty or one of its terms


class RateScheduler(LRScheduler):
    """Set lr and momentum of every parameter group before each step, from a plan or any function k ↦ `Rates`.

    Call ``step()`` after each ``optimizer.step()``, as with every scheduler. Parameter groups keep the ratios of their
    lr: the largest becomes lr_k. Momentum is the same in all groups.

    The indexing is that of the paper: step k = 0, 1, … uses lr_k = 1/M_k and momentum 1 − γ_{k−1}, since γ_{k−1} weighs
    the gradient of step k against the average of earlier gradients. (Step 0 starts the average; its momentum is that of
    ``rates(0)`` and has no effect.)

    Args:
        optimizer: an optimizer with ``momentum`` in its parameter groups, such as `ProxSGD`.
        rates: `CosineRates`, a `theory.Plan`, a `theory.IncreasingSchedule`, or any function from the step to
            `theory.Rates`. Not saved in ``state_dict``: pass the same one when you resume.
        last_epoch: the number of the last step taken, -1 to start.

    >>> import torch, proxmo
    >>> optimizer = proxmo.ProxSGD([torch.zeros(2, requires_grad=True)])
    >>> scheduler = RateScheduler(optimizer, lambda k: Rates(lr=1 / (k + 1), momentum=1 - 1 / (k + 2)))
    >>> optimizer.step(); scheduler.step(); optimizer.step(); scheduler.step()
    >>> optimizer.param_groups[0]["lr"] == 1 / 3, optimizer.param_groups[0]["momentum"] == 1 - 1 / 3
    (True, True)
    """

    def __init__(self, optimizer: Optimizer, rates: Callable[[int], Rates], last_epoch: int = -1) -> None:
        for group in optimizer.param_groups:
            if "momentum" not in group:
                raise ValueError(f"optimizer must have a momentum in each group, got {type(optimizer).__name__}")
        if not callable(rates) or isinstance(rates, type):  # a class, called, would make rates and not return them
            raise TypeError(f"rates must be CosineRates, a plan or a function from the step to Rates, got {rates!r}")
        self.rates = rates
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]  # torch allows tensors, we make floats
        """Return lr for the next step, and set momentum, as torch's own cyclic schedulers do."""
        k = self.last_epoch
        # With momentum exactly 0 the optimizer keeps no average, which a later momentum needs.
        momentum = max(self.rates(max(k - 1, 0)).momentum, sys.float_info.min)
        for group in self.optimizer.param_groups:
            group["momentum"] = momentum
        lr = self.rates(k).lr
        initial = [float(of_group) for of_group in self.base_lrs]
        largest = max(initial)
        return [lr * (of_group / largest) if largest > 0 else lr for of_group in initial]

    def state_dict(self) -> dict[str, Any]:
        """Return the state without ``rates``, a function that may not be serializable."""
        return {key: value for key, value in super().state_dict().items() if key != "rates"}


@dataclass(frozen=True)
class CosineRates:
    r"""Rates for `RateScheduler` that anneal lr along a cosine to 0, and 1 − momentum in proportion to lr.

    .. math::
        \mathrm{lr}_k = \mathrm{lr}\,\cos^2\Bigl(\frac{π}{2}\,\frac{k - w}{K - w}\Bigr), \qquad
        1 - μ_k = (1 - μ)\,\frac{\mathrm{lr}_k}{\mathrm{lr}}

    with K the horizon and w the warm-up, in which lr_k = lr·(k + 1)/(w + 1) for k < w. The last step, k = K − 1, still
    has lr > 0 and momentum < 1, as the optimizers require; later steps use the same rates.

    Why both: the noise of the average of gradients falls with 1 − momentum. If only lr falls, this noise stays, and
    keeps weights away from zero that the penalty should hold there.

    Args:
        lr: the largest step size, > 0.
        momentum: μ in [0, 1), the momentum at that step size.
        horizon: K ≥ 1, the number of steps.
        warmup: w, the number of steps before the largest lr, 0 ≤ w < horizon.

    >>> rates = CosineRates(lr=0.5, momentum=0.9, horizon=100)
    >>> rates(0)
    Rates(lr=0.5, momentum=0.9)
    >>> half = rates(50)
    >>> round(half.lr, 6), round(half.momentum, 6)
    (0.25, 0.95)
    """

    lr: float
    momentum: float
    horizon: int
    warmup: int = 0

    def __post_init__(self) -> None:
        checks.more_than(0, "lr", self.lr)
        if not 0 <= checks.number("momentum", self.momentum, takes="a number in [0, 1)") < 1:
            raise ValueError(f"momentum must be a number in [0, 1), got {self.momentum!r}")
        checks.count("horizon", self.horizon, least=1)
        if checks.count("warmup", self.warmup) >= self.horizon:
            raise ValueError(f"warmup must be less than horizon = {self.horizon}, got {self.warmup!r}")

    def __call__(self, k: int) -> Rates:
        """Return the rates of step ``k``; beyond the horizon, those of the last step."""
        factor = self._factor(min(k, self.horizon - 1))
        # In very long runs 1 − momentum falls below the spacing of floats.
        momentum = min(1 - (1 - self.momentum) * factor, math.nextafter(1.0, 0.0))
        return Rates(self.lr * factor, momentum if factor < 1 else self.momentum)

    def _factor(self, k: int) -> float:
        if k < self.warmup:
            return (k + 1) / (self.warmup + 1)
        # the cosine as a sine of what is left: exactly 1 at first, and without cancellation at the end
        left = (self.horizon - k) / (self.horizon - self.warmup)
        return math.sin(math.pi / 2 * left) ** 2


class StrengthScheduler:
    """Multiply the strengths of all penalties by a factor of the step: a warm-up, a decay, or a path over strengths.

    Call ``step()`` after each ``optimizer.step()``. It can be combined with any lr scheduler. Step k = 0, 1, … uses
    strength·factor(k), with the strength that the penalty had when the scheduler was created. `ElasticNet` and
    `SparseGroup` have two strengths, which are both multiplied.

    Args:
        optimizer: a proxmo optimizer with a penalty that has a strength, in at least one parameter group.
        factor: a function from the step to a number ≥ 0. Not saved in ``state_dict``: pass the same one when you
            resume.

    >>> import torch, proxmo
    >>> optimizer = proxmo.ProxSGD([torch.zeros(2)], penalty=proxmo.L1(0.1))
    >>> scheduler = StrengthScheduler(optimizer, lambda k: min(1.0, k / 10))  # full strength from step 10
    >>> for _ in range(5):
    ...     optimizer.step()
    ...     scheduler.step()
    >>> optimizer.param_groups[0]["penalty"]
    L1(strength=0.05)
    """

    def __init__(self, optimizer: ProxOptimizer, factor: Callable[[int], float]) -> None:
        self._penalties = _distinct_penalties(optimizer)
        self._initial = [_weights(penalty) for penalty in self._penalties]
        if not any(self._initial):
            raise ValueError("optimizer must have a penalty with a strength in one of its parameter groups, got none")
        self.optimizer = optimizer
        self.factor = factor
        self.last_step = 0
        self._set()

    def step(self) -> None:
        """Set the strengths for the next step."""
        self.last_step += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the strengths before multiplication, as plain data."""
        return {"last_step": self.last_step, "initial": [dict(weights) for weights in self._initial]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned, with the strengths saved there."""
        if [set(weights) for weights in state["initial"]] != [set(weights) for weights in self._initial]:
            raise ValueError("cannot load the state of a scheduler for other penalties")
        self._initial = [dict(weights) for weights in state["initial"]]
        self.last_step = state["last_step"]
        self._set()

    def _set(self) -> None:
        factor = checks.nonnegative(f"factor({self.last_step})", self.factor(self.last_step))
        for penalty, weights in zip(self._penalties, self._initial, strict=True):
            for name, weight in weights.items():
                setattr(penalty, name, weight * factor)


def _distinct_penalties(optimizer: ProxOptimizer) -> list[Penalty]:
    """Return the penalties of all parameter groups, or what is trimmed, each once, since groups may share one."""
    penalties = [group["penalty"] for group in optimizer.param_groups if group["penalty"] is not None]
    untrimmed = [penalty.penalty if isinstance(penalty, Trimmed) else penalty for penalty in penalties]
    return list({id(penalty): penalty for penalty in untrimmed}.values())


def _weights(penalty: Penalty) -> dict[str, float]:
    return {field.name: getattr(penalty, field.name) for field in fields(penalty) if field.name in _WEIGHTS}
