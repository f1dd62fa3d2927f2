"""Step size and momentum over time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from proxmo.theory import Rates


class RateScheduler(LRScheduler):
    """Sets lr AND momentum of every parameter group before each step, from a plan or any function k ↦ `Rates`.

    With the indexing of the paper: step k = 0, 1, … uses lr_k = 1/M_k and momentum 1 − γ_{k−1}, since γ_{k−1} weighs
    the gradient that arrives at step k against an average made with M_{k−1}. (Step 0 starts the average; its momentum
    is that of ``rates(0)`` and has no effect.) Call ``step()`` after each
    ``optimizer.step()``, as with every scheduler.

    Args:
        optimizer: one with ``momentum`` in its parameter groups, such as `ProxSGD`.
        rates: a `theory.Plan`, a `theory.IncreasingSchedule`, or any function from the step to `theory.Rates`. Not
            saved in ``state_dict``: pass the same when you resume.
        last_epoch: the last step done, -1 to begin.

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
        self.rates = rates
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]  # torch allows tensors, we make floats
        """lr for the next step; sets momentum on the way, as torch's own cyclic schedulers do."""
        k = self.last_epoch
        # Exactly 0 would keep no average, and a later momentum would have nothing to go on from.
        momentum = max(self.rates(max(k - 1, 0)).momentum, sys.float_info.min)
        for group in self.optimizer.param_groups:
            group["momentum"] = momentum
        return [self.rates(k).lr] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """The state without the function of rates, which may not be data."""
        return {key: value for key, value in super().state_dict().items() if key != "rates"}
